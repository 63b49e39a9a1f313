"""The configuration of a run as one validated value."""
