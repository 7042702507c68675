"""The steps, one file each; a file's `down_revision` names the one before."""
