"""Tests of the KV blocks of two tiers: keys, pool, moves, windows."""
