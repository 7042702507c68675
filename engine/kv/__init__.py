"""KV blocks: accounting and tensors."""
