"""Operators on tensors: one door (ops), PyTorch twins (ref), kernels in Triton and CUDA."""
