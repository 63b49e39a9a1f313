"""Models: plain modules, unaware of device meshes, and torch-free descriptions of their costs."""
