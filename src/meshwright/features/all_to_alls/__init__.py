"""Bytes of all-to-alls in training steps, counted beside predictions."""
