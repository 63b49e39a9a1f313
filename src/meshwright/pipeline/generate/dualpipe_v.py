"""DualPipeV: the schedule of DeepSeek-V3 (DeepSeek-AI 2024, section 3.2.1) folded into a V (Qi et al. 2025).

In the steady state each rank overlaps a forward of one chunk with a backward of the other: the computation of one hides
the expert-parallel communication of the other. Backwards are split only in the warm-up and cool-down.

p: ranks, r: a rank, m: micro-batches, at least 2p.
"""

from __future__ import annotations

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import Action, ActionKind, Overlap
from meshwright.pipeline.generate.stage_placement import v_placement
from meshwright.pipeline.schedule_table import Schedule
from meshwright.units import counted

K = ActionKind


def dualpipe_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Generate DualPipeV.

    Raises:
        ScheduleError: there are fewer than 2p micro-batches.
    """
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"only {counted(num_microbatches, 'micro-batch')} for {counted(num_ranks, 'rank')}",
            rule="dualpipe-v needs two micro-batches per rank to fill its pipeline from both ends",
            fix=f"use {2 * num_ranks} or more micro-batches, or zb-v",
        )
    rows = tuple(_RowBuilder(num_ranks, rank).fill(num_microbatches) for rank in range(num_ranks))
    return Schedule("dualpipe-v", num_microbatches, v_placement(num_ranks), rows)


class _RowBuilder:
    """Builder of one rank's row, with a micro-batch counter per kind and chunk."""

    def __init__(self, num_ranks: int, rank: int) -> None:
        self._num_ranks, self._rank = num_ranks, rank
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._weights: list[Action] = []
        self._actions: list[Action | Overlap] = []

    def fill(self, num_microbatches: int) -> tuple[Action | Overlap, ...]:
        """Return the actions of the eight phases shown in the paper's figure."""
        before, after = self._rank, self._num_ranks - self._rank - 1
        for _ in range(2 * after):
            self._do(self._forward(0))
        for _ in range(before + 1):
            self._do(self._forward(0), self._forward(1))
        for _ in range(after):
            self._do(self._input_gradient(1), self._weight_gradient(), self._forward(1))
        for i in range(num_microbatches - 2 * self._num_ranks + before + 1):
            if i == 0 and after == 0:
                # The last rank's two chunks are adjacent stages, so this backward depends on this forward.
                self._do(self._forward(0), self._backward(1))
            else:
                self._overlap(0, 1)
            self._overlap(1, 0)
        for _ in range(after):
            self._do(self._backward(1))
            self._overlap(1, 0)
        splits = False
        for i in range(before + 1):
            splits = splits or (i == (before + 1) // 2 and before % 2 == 1)
            self._do(self._input_gradient(1) if splits else self._backward(1))
            splits = splits or (i == (before + 1) // 2 and before % 2 == 0)
            self._do(self._input_gradient(0) if splits else self._backward(0))
        for _ in range(after):
            self._do(self._weight_gradient(), self._input_gradient(0))
        while self._weights:
            self._do(self._weight_gradient())
        return tuple(self._actions)

    def _do(self, *actions: Action) -> None:
        self._actions.extend(actions)

    def _overlap(self, forward_chunk: int, backward_chunk: int) -> None:
        self._actions.append(Overlap(self._forward(forward_chunk), self._backward(backward_chunk)))

    def _forward(self, chunk: int) -> Action:
        self._forwards[chunk] += 1
        return Action(K.FORWARD, self._stages[chunk], self._forwards[chunk] - 1)

    def _backward(self, chunk: int) -> Action:
        self._backwards[chunk] += 1
        return Action(K.BACKWARD, self._stages[chunk], self._backwards[chunk] - 1)

    def _input_gradient(self, chunk: int) -> Action:
        self._backwards[chunk] += 1
        microbatch = self._backwards[chunk] - 1
        self._weights.append(Action(K.BACKWARD_WEIGHT, self._stages[chunk], microbatch))
        return Action(K.BACKWARD_INPUT, self._stages[chunk], microbatch)

    def _weight_gradient(self) -> Action:
        return self._weights.pop(0)
