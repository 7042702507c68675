"""From a command line to checked configurations."""
