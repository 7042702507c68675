"""Tests of engine/schedule."""
