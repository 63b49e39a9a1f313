"""Compressed gradients and weights: codecs, error feedback, and collectives for FSDP2 and DDP that send fewer bits."""
