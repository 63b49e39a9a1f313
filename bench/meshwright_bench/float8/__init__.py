"""`bench float8`: losses of training in float8, and on GPUs the time of its linear layers."""
