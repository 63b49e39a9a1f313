"""Benchmark of attention under masks, against plain causal attention."""
