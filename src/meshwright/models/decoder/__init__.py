"""Decoder-only language models: what families of them share."""
