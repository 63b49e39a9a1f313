"""Transfers between meshes on different ranks, such as trainer to inference or stage to stage."""
