"""Checkpoints: saved from any layout, loaded onto any other, safe against a kill, never pickled."""
