"""What a family of models and its task are to the rest: all that somebody who adds one implements."""
