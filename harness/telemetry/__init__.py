"""Telemetry of a run: a sampler in a process of its own, its rows, and what they say of a run."""
