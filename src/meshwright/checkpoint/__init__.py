"""Sharded checkpoints that load onto any layout, survive a kill at any time, and never use pickle."""
