"""Models: plain modules that know no mesh, and their cost facts as torch-free values."""
