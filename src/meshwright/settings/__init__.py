"""Base classes for configuration sections, and rule violations; used by the run's own keys and by model families."""
