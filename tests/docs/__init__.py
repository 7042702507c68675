"""Tests of docs/."""
