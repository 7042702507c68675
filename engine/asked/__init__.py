"""What is asked of the engine: settings, checked once and then read-only. No torch."""
