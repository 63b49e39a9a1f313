"""Named mesh axes as values, and the device meshes and process groups built from them."""
