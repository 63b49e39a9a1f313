"""Neural network building blocks, independent of device meshes."""
