"""Searches for settings."""
