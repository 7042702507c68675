"""Tests of harness/forecast."""
