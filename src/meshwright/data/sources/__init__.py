"""Sources of text: files, JSON lines, and objects of the user's own code."""
