"""Checkpoints on this machine: fetched once, converted once, found again by name."""
