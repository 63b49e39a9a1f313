"""Proofs of training scripts that are not ours: recorded on several layouts, compared with the first of them."""
