"""Models that were not written for Meshwright: a forward shows what a family would describe."""
