"""Tests of harness.models."""
