"""Tests of engine/device."""
