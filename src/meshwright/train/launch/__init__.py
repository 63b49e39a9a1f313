"""Launch the ranks of a run on this machine, watch them, stop them, and report why one failed."""
