"""Residual dropout in one pass, with masks that are a function of the token and the channel instead of RNG state."""
