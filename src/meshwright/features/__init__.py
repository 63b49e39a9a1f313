"""Features that only some runs need: a folder each behind one contract, imported only where it is on."""
