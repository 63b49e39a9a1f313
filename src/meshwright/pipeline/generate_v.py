"""V-shaped schedules ZB-V, V-Half, V-Min and DualPipeV, with two chunks per rank, the second on the way back up.

ZB-V: Qi et al. 2024, "Zero bubble pipeline parallelism", section 6. V-Half, V-Min: Qi et al. 2024, "Pipeline
parallelism with controllable memory", section 3: the forwards and input gradients of one micro-batch form a *building
block*. Each micro-batch takes 6 units of work per rank. The offsets within a block are distinct modulo 6 on each rank,
so the block can be repeated every 6 units. The time between a forward and its backward determines the memory. The
offsets used here come from our own search over all small spacings for the smallest bubble at the published peak.

F0 is a forward of the rank's first chunk, F1 of its second.

DualPipeV: the schedule of DeepSeek-V3 (DeepSeek-AI 2024, section 3.2.1) folded into a V (Qi et al. 2025).

In the steady state each rank overlaps a forward of one chunk with a backward of the other: the computation of one hides
the expert-parallel communication of the other. Backwards are split only in the warm-up and cool-down.

p: ranks, r: a rank, m: micro-batches, at least 2p.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule
from meshwright.units import counted

K = ActionKind

PERIOD = 6
"""Units of work per micro-batch and rank: F, I and W of two chunks."""


def zb_v(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Generate ZB-V: no bubble if F, I and W take the same time, with the peak memory of 1F1B.

    Rank r starts with 2(p−r)−1 times F0, then r times F1 F0, then F1 I1 W1 until its first micro-batch is back in the
    first chunk. In the steady state it repeats F0 I0 W0 F1 I1 W1. At the end, weight gradients are deferred as long as
    a neighboring rank waits for an input gradient.
    """
    rows = tuple(_zb_v_row(num_ranks, rank, num_microbatches) for rank in range(num_ranks))
    return Schedule("zb-v", num_microbatches, v_placement(num_ranks), rows)


def v_half(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Generate V-Half: about half the bubble of 1F1B at half its peak memory, ⌊(p+2)/2⌋ micro-batches."""
    turns = (4, 2, 4) if num_ranks % 2 == 0 else (1, 1, 2)
    block = _BuildingBlock(num_ranks, spacing=(1, 2, 1, 2), turns=turns)
    return _repeat("v-half", block, num_microbatches, peak=(num_ranks + 2) // 2)


def v_min(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Generate V-Min: about two thirds of the bubble of 1F1B at a third of its peak memory, ⌊(p+4)/3⌋ micro-batches."""
    turns = (3, 1, 3) if num_ranks % 3 == 0 else (1, 1, 1)
    block = _BuildingBlock(num_ranks, spacing=(1, 1, 1, 1), turns=turns)
    return _repeat("v-min", block, num_microbatches, peak=(num_ranks + 4) // 3)


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Place stages down the ranks and back up: the first rank has the first and the last stage."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _zb_v_row(num_ranks: int, rank: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of one rank; actions beyond the last micro-batch are skipped."""
    stages = (rank, 2 * num_ranks - 1 - rank)
    done = dict.fromkeys(((kind, chunk) for kind in "FIW" for chunk in (0, 1)), 0)
    row: list[Action] = []

    def do(*names: str) -> None:
        for name in names:
            key = (name[0], int(name[1]))
            if done[key] < num_microbatches and (name[0] == "F" or done[key] < done["FI"["IW".index(name[0])], key[1]]):
                row.append(Action(K(name[0]), stages[key[1]], done[key]))
                done[key] += 1

    for _ in range(2 * (num_ranks - rank) - 1):
        do("F0")
    for _ in range(rank):
        do("F1", "F0")
    for _ in range(num_ranks - rank):
        do("F1", "I1", "W1")
    while done["F", 1] < done["F", 0] or done["F", 0] < num_microbatches:
        do("F0", "I0", "W0", "F1", "I1", "W1")
    for _ in range(rank):
        do("I0", "I1")
    for _ in range(num_ranks - rank):
        do("I0", "W0")
    while done["I", 0] < num_microbatches or done["I", 1] < num_microbatches:
        do("I1", "I0")
    while done["W", 0] < num_microbatches or done["W", 1] < num_microbatches:
        do("W1", "W0")
    return tuple(row)


@dataclass(frozen=True)
class _BuildingBlock:
    """Start times of micro-batch 0 on each rank, in units of one F, I or W.

    Attributes:
        spacing: offsets between adjacent ranks, for F0, F1, I1 and I0.
        turns: offsets between F0 and F1 on the last rank, F1 and I1 on the first, I1 and I0 on the last.
    """

    num_ranks: int
    spacing: tuple[int, int, int, int]
    turns: tuple[int, int, int]

    def order(self, rank: int, num_microbatches: int) -> list[Action]:
        """Return the F and I actions of all micro-batches on a rank, in the order of the repeated blocks."""
        last = self.num_ranks - 1
        up, down = rank, last - rank
        f0, f1, i1, i0 = self.spacing
        at_f1 = f0 * last + self.turns[0] + f1 * down
        at_i1 = f0 * last + self.turns[0] + f1 * last + self.turns[1] + i1 * up
        at_i0 = at_i1 + i1 * down + self.turns[2] + i0 * down
        stages = (rank, 2 * self.num_ranks - 1 - rank)
        block = [
            (f0 * up, Action(K.FORWARD, stages[0])),
            (at_f1, Action(K.FORWARD, stages[1])),
            (at_i1, Action(K.BACKWARD_INPUT, stages[1])),
            (at_i0, Action(K.BACKWARD_INPUT, stages[0])),
        ]
        assert len({offset % PERIOD for offset, _ in block}) == len(block), "blocks would collide"
        timed = [(offset + PERIOD * m, action, m) for m in range(num_microbatches) for offset, action in block]
        timed.sort(key=lambda entry: entry[0])
        return [Action(action.kind, action.stage, m) for _, action, m in timed]


def _repeat(kind: str, block: _BuildingBlock, num_microbatches: int, *, peak: int) -> Schedule:
    """Repeat a block, close the gaps, and insert W where the rank would idle or its memory is full.

    Args:
        peak: maximum number of micro-batches held by a rank, counting the activations of both chunks.
    """
    num_ranks = block.num_ranks
    num_stages = 2 * num_ranks
    queues = [deque(block.order(rank, num_microbatches)) for rank in range(num_ranks)]
    weights: list[deque[Action]] = [deque() for _ in range(num_ranks)]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    held = [0] * num_ranks
    done: set[tuple[ActionKind, int, int]] = set()

    def is_ready(action: Action) -> bool:
        stage, m = action.stage, action.microbatch
        if action.kind is K.FORWARD:
            return stage == 0 or (K.FORWARD, stage - 1, m) in done
        received = stage == num_stages - 1 or (K.BACKWARD_INPUT, stage + 1, m) in done
        return received and (K.FORWARD, stage, m) in done

    while any(queues) or any(weights):
        finished = []
        for rank, (queue, pending) in enumerate(zip(queues, weights, strict=True)):
            is_full = held[rank] >= 2 * peak
            if queue and is_ready(queue[0]) and not (queue[0].kind is K.FORWARD and is_full):
                action = queue.popleft()
            elif pending:
                action = pending.popleft()
            else:
                continue
            rows[rank].append(action)
            if action.kind is K.BACKWARD_INPUT:
                pending.append(Action(K.BACKWARD_WEIGHT, action.stage, action.microbatch))
            held[rank] += {K.FORWARD: 1, K.BACKWARD_INPUT: 0, K.BACKWARD_WEIGHT: -1}[action.kind]
            finished.append((action.kind, action.stage, action.microbatch))
        assert finished, "the repeated building block deadlocks"
        done.update(finished)
    return Schedule(kind, num_microbatches, v_placement(num_ranks), tuple(map(tuple, rows)))


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
