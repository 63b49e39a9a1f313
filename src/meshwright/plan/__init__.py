"""A run as one value: made from the configuration, verified, priced, and obeyed by what runs it. Torch-free."""
