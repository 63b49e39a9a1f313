"""Test utilities: gangs of worker processes."""
