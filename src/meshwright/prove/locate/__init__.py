"""Locate where a forward goes wrong: compare the values that each module takes and returns, in a second pass."""
