"""Models by name: their source, sizes, files and state on this machine; no Hydra, no torch."""
