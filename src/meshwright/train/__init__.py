"""A config becomes a running job."""
