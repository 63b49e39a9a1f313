"""`bench capture`: captured layers against eager ones, and the memory of graphs."""
