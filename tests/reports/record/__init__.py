"""Tests of reports/record."""
