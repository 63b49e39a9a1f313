"""Compressed gradients and weights, with error feedback."""
