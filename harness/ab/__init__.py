"""scenario=ab: two compositions compared in pairs of runs, each in fresh processes."""
