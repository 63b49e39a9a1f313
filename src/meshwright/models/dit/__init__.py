"""Diffusion transformers for images and videos."""
