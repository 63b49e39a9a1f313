"""Recording of both sides of a proof: the layout on its ranks and the reference on one device."""
