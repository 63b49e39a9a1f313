"""Several sources read in proportion to their weights, and sources of a validation split."""
