"""Measure some steps of a run: where their time went, memory by type, and bytes by purpose."""
