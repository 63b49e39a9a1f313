"""A simulated clock for overlapped tasks: computations and all-to-alls take simulated time."""

from __future__ import annotations

from meshwright.comm.overlap import switch_task


class VirtualClock:
    """Time and events of one rank. Computations share the processor; any number of all-to-alls are in flight."""

    def __init__(self):
        self.now, self.events = 0.0, []

    def compute(self, name, time):
        """Occupy the processor."""
        self.events.append(f"compute {name}")
        self.now += time

    def all_to_all(self, name, time):
        """Start an all-to-all, let the other task run, and wait."""
        self.events.append(f"start {name}")
        done = self.now + time
        switch_task()
        self.now = max(self.now, done)
        self.events.append(f"done {name}")
