"""Where weights live and how they reach the compute."""
