"""Figures and text descriptions of plans."""
