"""Hardware facts as data: devices, the links between them, and presets."""
