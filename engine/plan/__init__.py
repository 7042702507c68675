"""Where every byte goes and what a step takes: pure arithmetic, no torch."""
