"""Tests of the registry's models: runs of the harness, their progress and their results."""
