"""Lays a plain model on a mesh. Models know nothing of it."""
