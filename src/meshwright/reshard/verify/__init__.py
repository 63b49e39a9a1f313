"""Verification of plans: correctness of the data movement, memory and stated cost."""
