"""PyTorch inference with weights or KV cache outside the GPU; usable alone."""
