"""Tests of engine/plan."""
