"""Diagnose differences: infer the likely cause from the values."""
