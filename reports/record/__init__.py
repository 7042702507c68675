"""File formats of a run, the metric table and the rules for numbers as text."""
