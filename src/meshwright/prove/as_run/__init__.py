"""Prove a run as configured: in its precision, compiled, with its codecs and dropout, within measured tolerances."""
