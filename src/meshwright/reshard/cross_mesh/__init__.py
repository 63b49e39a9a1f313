"""Transfers between meshes on different ranks, such as trainer to inference or one pipeline stage to the next."""
