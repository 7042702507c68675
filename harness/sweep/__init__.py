"""Points of one command: run, taken over, skipped, shown."""
