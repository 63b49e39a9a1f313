"""`bench/gpu`: everything that a GPU must show, in one command."""
