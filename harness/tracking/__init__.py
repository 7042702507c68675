"""Where runs are mirrored for comparison; the files of the run folder stay the truth."""
