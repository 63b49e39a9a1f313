"""Attention and rotary position embedding."""
