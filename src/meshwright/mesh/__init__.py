"""Named mesh axes, tensor layouts, and the device meshes and process groups built from the axes."""
