"""Transfers between meshes on different ranks: trainer to inference, stage to stage."""
