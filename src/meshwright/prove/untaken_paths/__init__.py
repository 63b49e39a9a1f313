"""What ordinary steps don't show: steps that are skipped, later learning rates, an epoch's end."""
