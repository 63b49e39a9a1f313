"""Neural network building blocks, unaware of device meshes."""
