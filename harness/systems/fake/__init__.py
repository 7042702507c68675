"""model=fake: an engine with scripted times, memory, tokens and failures, to try the harness."""
