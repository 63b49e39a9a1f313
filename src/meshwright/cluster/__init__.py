"""Hardware descriptions: devices, links between them, and cluster presets."""
