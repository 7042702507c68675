"""Operators on tensors: one door (ops), PyTorch twins (ref), Triton kernels."""
