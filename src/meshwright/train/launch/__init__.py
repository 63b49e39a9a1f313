"""Launch, monitor and stop the ranks of a run on this machine, and report failures."""
