"""Optimizers: what one is, those built in, and updates from whole matrices whose shards lie on several ranks."""
