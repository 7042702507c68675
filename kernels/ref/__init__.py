"""PyTorch twins of every operator."""
