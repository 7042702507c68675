"""Tests of what is measured beside the engine."""
