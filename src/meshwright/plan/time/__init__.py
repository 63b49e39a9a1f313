"""Predict how long a step of a plan takes: a fold over the plan, priced by a cluster's performance."""
