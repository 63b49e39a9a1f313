"""The docs site and the notebook."""
