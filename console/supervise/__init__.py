"""Servers of this machine: started, watched, ended; the jobs that do so; and the machine."""
