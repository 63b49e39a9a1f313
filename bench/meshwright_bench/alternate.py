"""Interleaved measurement of several arms in one run.

Machine speed drifts with clocks, temperature and other jobs. The arms therefore alternate in rounds of A B B A (more
arms run forward, then in reverse), so that a steady drift affects all arms equally and cancels in the ratio. The result
is the median of the per-round ratios; their minimum and maximum show how steady the machine was. Torch-free: the timer
is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Work = Callable[[], None]
Timer = Callable[[Work], float]
"""Function that runs the work and returns its duration in seconds, including everything it launches."""


@dataclass(frozen=True)
class Alternation:
    """Seconds per step of each arm and round."""

    seconds: Mapping[str, tuple[float, ...]]

    def step_seconds(self, arm: str) -> float:
        """Return the median seconds per step."""
        return median(self.seconds[arm])

    def speedups(self, arm: str, *, over: str) -> tuple[float, ...]:
        """Return the speed of `arm` relative to `over` in each round."""
        return tuple(
            baseline / seconds for seconds, baseline in zip(self.seconds[arm], self.seconds[over], strict=True)
        )

    def speedup(self, arm: str, *, over: str) -> float:
        """Return the median speed-up over the rounds."""
        return median(self.speedups(arm, over=over))

    def spread(self, arm: str, *, over: str) -> tuple[float, float]:
        """Return the minimum and maximum speed-up over the rounds."""
        values = self.speedups(arm, over=over)
        return min(values), max(values)


def variant_name(arm: str, fields: Mapping[str, int]) -> str:
    """Return the name of an arm's variant, whose values of these fields are not the defaults."""
    return ".".join([arm, *(f"{field}_{value}" for field, value in fields.items())])


def alternate(arms: Mapping[str, Callable[[], object]], *, timer: Timer, rounds: int, steps: int) -> Alternation:
    """Time arms that have been warmed up, in alternating blocks.

    Args:
        arms: functions that run one step, by name.
        timer: times a block of steps.
        rounds: number of rounds; each arm runs two blocks per round.
        steps: steps per block, so each arm runs `2 · rounds · steps`.
    """
    assert rounds >= 1 and steps >= 1, "nothing to measure"
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        total = dict.fromkeys(arms, 0.0)
        for name in _round_order(list(arms)):
            total[name] += timer(_block(arms[name], steps))
        for name, value in total.items():
            seconds[name].append(value / (2 * steps))
    return Alternation({name: tuple(values) for name, values in seconds.items()})


def _round_order(names: Sequence[str]) -> list[str]:
    """Return the names forward, then in reverse: A B B A."""
    return [*names, *reversed(names)]


def _block(step: Callable[[], object], steps: int) -> Work:
    def work() -> None:
        for _ in range(steps):
            step()

    return work
