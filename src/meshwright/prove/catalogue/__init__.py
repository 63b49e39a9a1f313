"""Proofs of many models and layouts in one go: the catalogue of what transformers has."""
