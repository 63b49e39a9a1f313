"""Run training from a plan on every rank."""
