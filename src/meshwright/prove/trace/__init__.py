"""Locate where a step goes wrong: compare what modules take and return, forward and backward, in a second pass."""
