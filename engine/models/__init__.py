"""The functional decoder and its table of architectures."""
