"""Tests of harness/work."""
