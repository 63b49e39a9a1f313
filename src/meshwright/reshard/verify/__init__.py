"""Verify plans: what they move, what they hold, and the cost that they state."""
