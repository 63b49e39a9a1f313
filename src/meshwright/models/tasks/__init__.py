"""Training tasks shared by several model families."""
