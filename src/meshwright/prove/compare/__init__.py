"""Comparison of the two sides of a proof: a verdict on each tensor and scalar."""
