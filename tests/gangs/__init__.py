"""Gangs of worker processes, which run the bodies of distributed tests."""
