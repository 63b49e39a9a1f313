"""The whole run as one validated value."""
