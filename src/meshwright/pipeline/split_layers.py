"""Assignment of layers and of shared parameters to pipeline stages.

Stages are balanced by cost, including the embedding and the output head, so the last stage gets fewer layers if the
vocabulary is large. A tied word embedding is on the first and the last stage; the conditioning embedders of a diffusion
transformer are on all stages. The model declares shared parameters explicitly; they are never inferred from names.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.errors import ScheduleError
from meshwright.units import counted


def balance_layers(
    layer_costs: Sequence[float], num_stages: int, *, before: float = 0.0, after: float = 0.0, allow_empty: bool = False
) -> tuple[int, ...]:
    """Return the layer counts per stage that minimize the cost of the most expensive stage.

    Args:
        before: additional cost of the first stage (embedding).
        after: additional cost of the last stage (output head).

    Raises:
        ScheduleError: there are more stages than layers, and `allow_empty` is False.
    """
    num_layers = len(layer_costs)
    fewest = 0 if allow_empty else 1
    if num_layers < fewest * num_stages:
        raise ScheduleError(
            f"{counted(num_stages, 'stage')} for {counted(num_layers, 'layer')}",
            rule="every stage needs at least one layer, unless empty stages are allowed",
            fix=f"use at most {counted(num_layers, 'stage')}, or set pipeline.allow_empty_stages=true",
        )
    total = [0.0]
    for cost in layer_costs:
        total.append(total[-1] + cost)

    def stage_cost(stage: int, start: int, stop: int) -> float:
        extra = before * (stage == 0) + after * (stage == num_stages - 1)
        return total[stop] - total[start] + extra

    # No stage of the best split costs more than the most expensive one of an even split.
    even = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    most = max(stage_cost(stage, even[stage], even[stage + 1]) for stage in range(num_stages)) * (1 + 1e-9)
    # best[stop]: (highest stage cost, sum of squared costs) of the best split of layers[:stop] so far.
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(math.inf, math.inf)] * num_layers
    choices: list[list[int]] = []
    for stage in range(num_stages):
        following, chosen = [(math.inf, math.inf)] * (num_layers + 1), [0] * (num_layers + 1)
        # Neither the stages up to this one nor those after it can hold more.
        first = bisect_left(total, total[-1] - (num_stages - stage - 1) * most)
        for stop in range(first, bisect_right(total, (stage + 1) * most - before)):
            for start in range(stop - fewest, -1, -1):
                cost = stage_cost(stage, start, stop)
                if cost > min(most, following[stop][0]):  # as are all stages that start earlier
                    break
                found = (max(best[start][0], cost), best[start][1] + cost * cost)
                if found < following[stop]:
                    following[stop], chosen[stop] = found, start
        best = following
        choices.append(chosen)
    counts, stop = [], num_layers
    for chosen in reversed(choices):
        counts.append(stop - chosen[stop])
        stop = chosen[stop]
    return tuple(reversed(counts))


def layer_ranges(layers_per_stage: Sequence[int]) -> tuple[range, ...]:
    starts = [sum(layers_per_stage[:stage]) for stage in range(len(layers_per_stage) + 1)]
    return tuple(range(starts[stage], starts[stage + 1]) for stage in range(len(layers_per_stage)))


@dataclass(frozen=True)
class SharedParameter:
    """Parameter replicated on several stages."""

    key: str
    sites: tuple[tuple[int, str], ...]
    """Stages that hold a replica and its qualified name in each stage's module, lowest stage first."""

    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.sites)


def stage_groups(shared: Iterable[SharedParameter]) -> tuple[tuple[int, ...], ...]:
    """Return the distinct sets of stages that share parameters; a table syncs each set once."""
    return tuple(sorted({parameter.stages() for parameter in shared if len(parameter.sites) > 1}))
