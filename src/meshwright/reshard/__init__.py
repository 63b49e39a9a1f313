"""From layout A to layout B: plans of collectives, priced, verified, drawn and run."""
