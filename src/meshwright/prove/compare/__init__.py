"""Compare the two sides of a proof: tensors and scalars, each with a verdict."""
