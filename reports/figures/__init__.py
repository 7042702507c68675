"""Figures of runs and of points, drawn with matplotlib."""
