"""Interfaces between model families, their tasks and the rest of Meshwright, to be implemented by new families."""
