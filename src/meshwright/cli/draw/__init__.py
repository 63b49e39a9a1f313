"""`meshwright draw`: figures of schedules, redistributions, captures, drift and losses."""
