"""Predicted against measured times and memory of training steps on this machine."""
