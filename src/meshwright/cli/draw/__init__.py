"""`meshwright draw`: figures of schedules, redistributions, captures, drift, losses and catalogues."""
