"""Tests of tightfit."""
