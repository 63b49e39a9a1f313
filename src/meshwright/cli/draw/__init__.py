"""`meshwright draw`: figures of schedules, redistributions, captures, losses and catalogues."""
