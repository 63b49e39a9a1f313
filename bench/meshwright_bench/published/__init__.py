"""Predictions of step times and memory against runs that others published."""
