"""Values prepared ahead of their use in a worker thread, and copied to the device beside the computation."""
