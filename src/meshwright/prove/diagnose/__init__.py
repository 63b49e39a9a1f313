"""Diagnose what differs: from the numbers to the cause, in words."""
