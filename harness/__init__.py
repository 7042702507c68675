"""One composed configuration in, one run record out."""
