"""Lower a compute-only table: add transfers, frees, buffer slots, sharding and shared-gradient syncs.

[Note: order of transfers] The compute actions are ordered by a simulation where F, I and W take one unit each. When an
action ends, its send is appended to its rank's row and the matching receive to the peer's row. All rows are therefore
subsequences of one global sequence with the two ends of each transfer adjacent, and the table cannot deadlock, even if
sends block until they are received and nothing is batched; `verify` checks this on the lowered table. A receive
precedes the first computation that could use it by at most one, which bounds the number of buffers; `_frees_input`
lowers the bound further for 1F1B.

[Note: lifetimes] A received input is held until the backward of its micro-batch, since autograd may have saved it
(recomputation always does), or until W, since a deferred weight gradient may need it. The same holds for a received
gradient. An output is freed before its stage's next send, when its own send has usually completed. With uneven stages a
rank may wait there (1 % of a simulated step if times differ by half); holding one more output would avoid the wait. The
gradient of an input is freed after the next one has been sent to the same rank, the last one at the end of the row, so
that the last reduction doesn't wait for it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.pipeline.actions import COMPUTE, RECVS, Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import Costs, action_times

K = ActionKind
Row = list[Action | Overlap]


@dataclass(frozen=True)
class LowerOptions:
    """Options for additions to a table besides transfers."""

    release: bool = True
    """Free inputs, outputs and gradients as early as possible; otherwise at the end of the step."""
    reduces: bool = False
    """Reduce each stage's gradients once, after its last backward (data parallelism)."""
    keeps_unsharded: bool = False
    """Unshard each stage's parameters once per step and keep them until its last backward."""
    shared: tuple[tuple[int, ...], ...] = ()


def lower(schedule: Schedule, options: LowerOptions = LowerOptions()) -> Schedule:
    """Return the table with everything needed to run it.

    Raises:
        ScheduleError: the table deadlocks.
    """
    rows = _with_transfers(schedule.compute_only())
    rows = [_with_frees(row, schedule, release=options.release) for row in rows]
    rows = [_with_sharding(row, options) for row in rows]
    rows = [_with_input_gradient_frees(row, schedule, release=options.release) for row in rows]
    rows = _with_shared(rows, schedule, options.shared)
    rows = [_with_slots(row) for row in rows]
    return replace(schedule, actions=tuple(map(tuple, rows)))


def forward_only(num_microbatches: int, stage_ranks: tuple[int, ...]) -> Schedule:
    """Return an evaluation table: forwards only, ordered by micro-batch and then by stage."""
    rows = tuple(
        tuple(
            Action(K.FORWARD, stage, m)
            for m in range(num_microbatches)
            for stage, owner in enumerate(stage_ranks)
            if owner == rank
        )
        for rank in range(max(stage_ranks) + 1)
    )
    return Schedule("forward only", num_microbatches, stage_ranks, rows)


def num_slots(schedule: Schedule, rank: int) -> dict[ActionKind, int]:
    """Return the number of a rank's receive buffers in a lowered table, for inputs and for gradients."""
    used = {K.RECV_FORWARD: 0, K.RECV_BACKWARD: 0}
    for action in schedule.actions[rank]:
        for part in action.parts():
            if part.slot is not None:
                used[part.kind] = max(used[part.kind], part.slot + 1)
    return used


def last_compute(row: Iterable[Action | Overlap]) -> dict[tuple[int, int], int]:
    """Return the position of the last computation of each stage and micro-batch: B, or W if the backward is split."""
    parts = ((part, at) for at, action in enumerate(row) for part in action.parts())
    return {(part.stage, part.microbatch): at for part, at in parts if part.kind in COMPUTE}


def _with_transfers(schedule: Schedule) -> list[Row]:
    events: list[tuple[float, int, int, int]] = []  # time, 0 for an end or 1 for a start, rank, position
    for rank, times in enumerate(action_times(schedule, Costs.uniform())):
        for position, (start, end) in enumerate(times):
            events += ((start, 1, rank, position), (end, 0, rank, position))
    events.sort()
    ranks, holds_back = schedule.stage_ranks, schedule.num_chunks == 1
    rows: list[Row] = [[] for _ in schedule.actions]
    waiting: list[list[Action]] = [[] for _ in schedule.actions]  # sends by receiving rank
    following = [row[0] if row else None for row in schedule.actions]

    def append_transfers(to_rank: int) -> None:
        """Append the pending transfers to a rank, except those that must wait for the rank's next computation."""
        waits = holds_back and _frees_input(following[to_rank])
        kept = []
        for send in waiting[to_rank]:
            if waits and send.kind is K.SEND_FORWARD:
                kept.append(send)
            else:
                rows[ranks[send.stage]].append(send)
                rows[to_rank].append(send.peer())
        waiting[to_rank] = kept

    for _, starts, rank, position in events:
        row = schedule.actions[rank]
        if starts:
            rows[rank].append(row[position])
            following[rank] = row[position + 1] if position + 1 < len(row) else None
            append_transfers(rank)
            continue
        for part in row[position].parts():
            if (send := schedule.send_after(part)) is not None:
                to_rank = ranks[send.peer().stage]
                waiting[to_rank].append(send)
                append_transfers(to_rank)
    return rows


def _frees_input(following: Action | Overlap | None) -> bool:
    """Return whether receiving an input should wait for the rank's next computation, a backward that frees a buffer.

    In 1F1B this happens once, at the end of the warm-up. It costs one transfer latency per step and saves one buffer,
    leaving p−r inputs and one gradient. With several chunks per rank it would happen constantly, so they never wait.
    """
    return isinstance(following, Action) and following.kind is K.BACKWARD


def _with_frees(row: Sequence[Action | Overlap], schedule: Schedule, *, release: bool) -> Row:
    last = last_compute(row)
    lowered: Row = []
    deferred: Row = []
    sent: dict[int, Action] = {}  # by stage: the free of the output being sent
    for position, action in enumerate(row):
        for part in action.parts():
            if part.kind is K.SEND_FORWARD:
                if part.stage in sent:
                    lowered.append(sent.pop(part.stage))
                sent[part.stage] = Action(K.FREE_OUTPUT, part.stage, part.microbatch)
        lowered.append(action)
        for part in action.parts():
            key = (part.stage, part.microbatch)
            if part.kind in COMPUTE and last[key] == position:
                freed: Row = []
                if schedule.is_transfer(part.stage - 1):
                    freed.append(Action(K.FREE_INPUT, *key))
                if schedule.is_transfer(part.stage) and part.kind is not K.FORWARD:
                    freed.append(Action(K.FREE_GRADIENT, *key))
                (lowered if release else deferred).extend(freed)
    if not release:
        lowered = [action for action in lowered if action.parts()[0].kind is not K.FREE_OUTPUT]
        outputs = [part for action in row for part in action.parts() if part.kind is K.SEND_FORWARD]
        return [*lowered, *deferred, *(Action(K.FREE_OUTPUT, part.stage, part.microbatch) for part in outputs)]
    return [*lowered, *sent.values()]


def _with_sharding(row: Row, options: LowerOptions) -> Row:
    """Add UNSHARD before a stage's first computation, and REDUCE and RESHARD after its last one.
    The last computation's send goes first, since the preceding stage waits for it."""
    if not options.reduces:
        return row
    computed = ((part.stage, at) for at, one in enumerate(row) for part in one.parts() if part.kind in COMPUTE)
    last = dict(computed)
    lowered: Row = []
    ending: Row = []
    unsharded: set[int] = set()
    for position, action in enumerate(row):
        if action.parts()[0].kind not in COMPUTE:
            lowered.append(action)
            continue
        lowered += ending
        for part in action.parts():
            if options.keeps_unsharded and part.stage not in unsharded:
                unsharded.add(part.stage)
                lowered.append(Action(K.UNSHARD, part.stage))
        lowered.append(action)
        # An overlap may contain a stage twice but ends it only once. An evaluation has no gradients to reduce.
        ended = {part.stage: part for part in action.parts() if last[part.stage] == position}
        ending = []
        for stage, part in ended.items():
            ending += [Action(K.REDUCE, stage)] * (part.kind is not K.FORWARD)
            ending += [Action(K.RESHARD, stage)] * options.keeps_unsharded
    return [*lowered, *ending]


def _with_shared(rows: list[Row], schedule: Schedule, shared: tuple[tuple[int, ...], ...]) -> list[Row]:
    """Append one sync per group in the same order on all ranks, named after the rank's first stage in the group."""
    for group in shared:
        on_ranks = {schedule.stage_ranks[stage]: stage for stage in reversed(group)}
        for rank, stage in on_ranks.items():
            rows[rank].append(Action(K.SYNC_SHARED, stage))
    return rows


def _with_input_gradient_frees(row: Row, schedule: Schedule, *, release: bool) -> Row:
    lowered: Row = []
    deferred: Row = []
    sent: dict[int, Action] = {}  # by receiving rank: the free of the gradient being sent
    for action in row:
        lowered.append(action)
        if isinstance(action, Action) and action.kind is K.SEND_BACKWARD:
            to_rank = schedule.stage_ranks[action.peer().stage]
            if to_rank in sent:
                (lowered if release else deferred).append(sent[to_rank])
            sent[to_rank] = Action(K.FREE_INPUT_GRADIENT, action.stage, action.microbatch)
    return [*lowered, *deferred, *sent.values()]


def _with_slots(row: Row) -> Row:
    """Assign the lowest free buffer to each receive, until the buffer is freed."""
    free: dict[ActionKind, list[int]] = defaultdict(list)
    used: dict[ActionKind, int] = defaultdict(int)
    slots: dict[tuple[ActionKind, int, int], int] = {}
    filled = {K.FREE_INPUT: K.RECV_FORWARD, K.FREE_GRADIENT: K.RECV_BACKWARD}
    lowered: Row = []
    for action in row:
        if isinstance(action, Overlap):
            lowered.append(action)
            continue
        if action.kind in RECVS:
            if not free[action.kind]:
                free[action.kind].append(used[action.kind])
                used[action.kind] += 1
            slot = heapq.heappop(free[action.kind])
            slots[action.kind, action.stage, action.microbatch] = slot
            action = Action(action.kind, action.stage, action.microbatch, slot)
        elif action.kind in filled:
            kind = filled[action.kind]
            heapq.heappush(free[kind], slots[kind, action.stage, action.microbatch])
        lowered.append(action)
    return lowered
