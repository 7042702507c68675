"""Tests of engine/weights."""
