"""Tests of the record format, the figures and the pages."""
