"""Diagnosis of differences: derives the likely cause from the values."""
