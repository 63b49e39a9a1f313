"""Which layers each stage of a pipeline has.

Stages are balanced by what their layers cost, the embedding and the output head counted: with a large vocabulary the
last stage has fewer layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.errors import ScheduleError


def balanced(
    layer_costs: Sequence[float], num_stages: int, *, before: float = 0.0, after: float = 0.0, allow_empty: bool = False
) -> tuple[int, ...]:
    """Layers per stage so that the dearest stage is as cheap as it can be.

    Args:
        layer_costs: of each layer, in any unit.
        num_stages: stages in the model's order.
        before: cost of what the first stage has besides layers.
        after: cost of what the last stage has besides layers.
        allow_empty: a stage may have no layer.

    Raises:
        ScheduleError: there are more stages than layers and none may be empty.
    """
    num_layers = len(layer_costs)
    fewest = 0 if allow_empty else 1
    if num_layers < fewest * num_stages:
        raise ScheduleError(
            f"{num_stages} stages for {num_layers} layers",
            rule="every stage has a layer, unless empty stages are allowed",
            fix=f"{num_layers} stages or fewer, or pipeline.allow_empty_stages=true",
        )
    total = [0.0]
    for cost in layer_costs:
        total.append(total[-1] + cost)

    def stage_cost(stage: int, start: int, stop: int) -> float:
        extra = before * (stage == 0) + after * (stage == num_stages - 1)
        return total[stop] - total[start] + extra

    # best[stop]: the dearest stage's cost, then the sum of squares, of the best split of layers[:stop] so far.
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [(math.inf, math.inf)] * num_layers
    choices: list[list[int]] = []
    for stage in range(num_stages):
        following: list[tuple[float, float]] = []
        chosen: list[int] = []
        for stop in range(num_layers + 1):
            options = []
            for start in range(stop - fewest + 1):
                cost = stage_cost(stage, start, stop)
                options.append(((max(best[start][0], cost), best[start][1] + cost * cost), -start))
            found = min(options, default=((math.inf, math.inf), 0))
            following.append(found[0])
            chosen.append(-found[1])
        best = following
        choices.append(chosen)
    counts, stop = [], num_layers
    for chosen in reversed(choices):
        counts.append(stop - chosen[stop])
        stop = chosen[stop]
    return tuple(reversed(counts))


def layer_ranges(layers_per_stage: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, counted through the model."""
    starts = [sum(layers_per_stage[:stage]) for stage in range(len(layers_per_stage) + 1)]
    return tuple(range(starts[stage], starts[stage + 1]) for stage in range(len(layers_per_stage)))
