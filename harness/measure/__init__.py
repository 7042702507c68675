"""Clocks, latencies and the resources of a run: numbers in, numbers out."""
