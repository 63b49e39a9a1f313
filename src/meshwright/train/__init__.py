"""Training: from a plan to a running job on every rank."""
