"""Layers captured as CUDA graphs in a run; the engine is the room `capture`."""
