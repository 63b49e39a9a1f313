"""Drift experiment: copies of shared parameters diverge if their gradients are not summed."""
