"""Tests of the sampler."""
