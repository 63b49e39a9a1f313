"""Sections of the configuration and violated rules, for the run's own keys and those that families bring."""
