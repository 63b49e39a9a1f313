"""Drift of shared parameters whose gradients are not summed: the experiment behind ."""
