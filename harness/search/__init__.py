"""Finds offload settings for an objective under constraints, with Optuna."""
