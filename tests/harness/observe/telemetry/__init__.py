"""Tests of harness.telemetry."""
