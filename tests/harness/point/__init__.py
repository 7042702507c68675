"""Tests of harness/point."""
