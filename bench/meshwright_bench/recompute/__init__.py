"""`bench recompute`: saved bytes and step time of recomputation policies."""
