"""Tests of harness/observe."""
