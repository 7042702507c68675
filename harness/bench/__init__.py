"""The table of speeds: engines in fresh processes against what link and memory allow."""
