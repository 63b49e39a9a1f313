"""Drift experiment: copies of shared parameters diverge when their gradients are not summed."""
