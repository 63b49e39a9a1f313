"""Validated, immutable configuration of a run."""
