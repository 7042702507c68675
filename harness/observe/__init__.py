"""What a machine does meanwhile, and what it can carry."""
