"""Tests of engine/asked."""
