"""Tests of the server: real processes, real sockets, a tiny model."""
