"""Measuring arms against each other in one run.

A machine's speed drifts: clocks, heat, other people's work. So the arms take turns, in rounds of A B B A (with more
arms: forward, then backward): within a round a steady drift hits all alike and cancels out of their ratio. A
round's ratio compares blocks that stand next to each other in time; the median over the rounds is what counts, and
the least and greatest say how steady the machine was. Torch-free: the timer is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Work = Callable[[], None]
Timer = Callable[[Work], float]
"""Runs the work and returns the seconds it took, everything it started included."""


@dataclass(frozen=True)
class Alternation:
    """Seconds a step of each arm, by round."""

    seconds: Mapping[str, tuple[float, ...]]

    def step_seconds(self, arm: str) -> float:
        """Median over the rounds."""
        return median(self.seconds[arm])

    def speedups(self, arm: str, *, over: str) -> tuple[float, ...]:
        """By round, how many times as fast `arm` was as `over`."""
        return tuple(theirs / own for own, theirs in zip(self.seconds[arm], self.seconds[over], strict=True))

    def speedup(self, arm: str, *, over: str) -> float:
        """Median over the rounds."""
        return median(self.speedups(arm, over=over))

    def spread(self, arm: str, *, over: str) -> tuple[float, float]:
        """Least and greatest of the rounds' speed-ups."""
        values = self.speedups(arm, over=over)
        return min(values), max(values)


def alternate(arms: Mapping[str, Callable[[], object]], *, timer: Timer, rounds: int, steps: int) -> Alternation:
    """Measure arms that are warm already.

    Args:
        arms: by name, what runs one step.
        timer: times a block of steps.
        rounds: how often each arm's turn comes, twice a round.
        steps: steps of a block, so `2 · rounds · steps` an arm.
    """
    assert rounds >= 1 and steps >= 1, "nothing to measure"
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        total = dict.fromkeys(arms, 0.0)
        for name in _turns(list(arms)):
            total[name] += timer(_block(arms[name], steps))
        for name, value in total.items():
            seconds[name].append(value / (2 * steps))
    return Alternation({name: tuple(values) for name, values in seconds.items()})


def _turns(names: Sequence[str]) -> list[str]:
    """A B B A."""
    return [*names, *reversed(names)]


def _block(step: Callable[[], object], steps: int) -> Work:
    def work() -> None:
        for _ in range(steps):
            step()

    return work
