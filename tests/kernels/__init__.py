"""Operators against their twins, and the twins against independent formulas."""
