"""Tests of what the project promises: commands, names, file sizes, texts."""
