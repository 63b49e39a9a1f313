"""Proofs of runs as configured."""
