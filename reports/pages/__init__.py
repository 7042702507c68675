"""Pages of a run, a sweep, a comparison: what they show, and their files."""
