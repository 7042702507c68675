"""Tests of harness/sweep."""
