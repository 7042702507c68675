"""Tests of model=fake, and with it of the harness."""
