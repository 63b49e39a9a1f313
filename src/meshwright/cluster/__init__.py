"""Hardware descriptions: devices, the links between them, and cluster presets."""
