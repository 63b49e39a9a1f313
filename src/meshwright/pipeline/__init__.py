"""Pipeline schedules as tables. Every training step goes through one, also without pipeline parallelism."""
