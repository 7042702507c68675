"""Kernels in CUDA, compiled on the machine they run on."""
