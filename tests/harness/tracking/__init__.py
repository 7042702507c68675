"""Tests of harness/tracking."""
