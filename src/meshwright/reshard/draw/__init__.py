"""Draw plans as figures, and explain them in text."""
