"""Tests of harness/config."""
