"""From a table of compute to the one that is run: transfers, frees, buffer slots, sharding and shared gradients.

[Note: where transfers go] The compute actions are put in the order of a simulation where F, I and W take one unit.
When one ends, its send is appended to its rank's row and the receive, at the same moment, to the other rank's row. So
all rows are parts of one sequence in which the two ends of a transfer are neighbours, and no table can deadlock even
where a send waits for its receive and nothing is batched; `verify` sees that on the finished table. A receive comes at
most one computation before the one that needs it can start, which bounds the buffers; `_waits` bounds those of 1F1B.

[Note: how long things are held] A received input stays until the backward of its micro-batch, because autograd may
have saved it (recompute always does), or until W, when a deferred weight gradient may hold it; the same goes for a
received gradient. An output is freed before the next send of its stage: by then it has usually left. Where stages
differ a rank may wait there (1 % of a simulated step with times that differ by half), which one more output would save.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.pipeline.actions import BACKWARDS, COMPUTE, RECVS, Action, ActionKind, Overlap
from meshwright.pipeline.costs import Costs
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.simulate import simulate

K = ActionKind
Row = list[Action | Overlap]


@dataclass(frozen=True)
class LowerOptions:
    """What the job behind a table needs beyond transfers."""

    release: bool = True
    """Free inputs, outputs and gradients as soon as they can be; otherwise at the end of the step."""
    reduces: bool = False
    """Stages are sharded or replicated: their gradients are reduced once, after the last backward."""
    keeps_unsharded: bool = False
    """A stage's parameters are gathered once a step and stay until its last backward."""
    shared: tuple[tuple[int, ...], ...] = ()
    """Groups of stages with a copy of the same parameter each."""


def lower(schedule: Schedule, options: LowerOptions = LowerOptions()) -> Schedule:
    """Everything that running a compute table takes.

    Raises:
        ScheduleError: the table can't be run to its end.
    """
    rows = _with_transfers(schedule.compute_only())
    rows = [_with_frees(row, schedule, release=options.release) for row in rows]
    rows = [_with_sharding(row, options) for row in rows]
    rows = _with_shared(rows, schedule, options.shared)
    rows = [_with_slots(row) for row in rows]
    return replace(schedule, actions=tuple(map(tuple, rows)))


def forward_only(num_microbatches: int, stage_ranks: tuple[int, ...]) -> Schedule:
    """The table of an evaluation: forwards only, micro-batch after micro-batch through all stages of a rank."""
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
    """Buffers that a lowered table's rank needs for received inputs and for received gradients."""
    used = {K.RECV_FORWARD: 0, K.RECV_BACKWARD: 0}
    for action in schedule.actions[rank]:
        for part in action.parts():
            if part.slot is not None:
                used[part.kind] = max(used[part.kind], part.slot + 1)
    return used


def last_use(row: Iterable[Action | Overlap]) -> dict[tuple[int, int], int]:
    """Position of the last computation on each stage and micro-batch: B, or W where the backward is split."""
    last = {}
    for position, action in enumerate(row):
        for part in action.parts():
            if part.kind in COMPUTE:
                last[part.stage, part.microbatch] = position
    return last


def _with_transfers(schedule: Schedule) -> list[Row]:
    timeline = simulate(schedule, Costs.uniform()).timeline
    begins: dict[tuple[int, Action], float] = {}
    ends: dict[tuple[int, Action], float] = {}
    for span in timeline.spans:
        begins[span.rank, span.action], ends[span.rank, span.action] = span.start, span.end
    events: list[tuple[float, int, int, int]] = []  # time, ends before starts, rank, position
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            parts = action.parts()
            heapq.heappush(events, (begins[rank, parts[0]], 1, rank, position))
            heapq.heappush(events, (ends[rank, parts[-1]], 0, rank, position))
    rows: list[Row] = [[] for _ in schedule.actions]
    started = [0] * schedule.num_ranks
    waiting: list[list[Action]] = [[] for _ in schedule.actions]  # sends, by the rank that receives

    def post(to_rank: int) -> None:
        """Append what waits for a rank, unless it is to wait for the rank's next computation."""
        ready = [send for send in waiting[to_rank] if not _waits(send, schedule, to_rank, started[to_rank])]
        waiting[to_rank] = [send for send in waiting[to_rank] if send not in ready]
        for send in ready:
            rows[schedule.stage_ranks[send.stage]].append(send)
            rows[to_rank].append(send.peer())

    while events:
        _, starts, rank, position = heapq.heappop(events)
        action = schedule.actions[rank][position]
        if starts:
            rows[rank].append(action)
            started[rank] = position + 1
            post(rank)
            continue
        for send in filter(None, (_send_after(part, schedule) for part in action.parts())):
            to_rank = schedule.stage_ranks[send.peer().stage]
            waiting[to_rank].append(send)
            post(to_rank)
    return rows


def _waits(send: Action, schedule: Schedule, to_rank: int, next_position: int) -> bool:
    """Whether an input comes too early: the rank's next computation is a backward, which frees the room for it.

    In 1F1B that happens once, at the end of the warm-up, and costs one transfer's latency a step for one buffer less:
    p−r inputs and a gradient. With more chunks a rank it would happen all the time, so there inputs may come early.
    """
    if send.kind is not K.SEND_FORWARD or schedule.num_chunks > 1:
        return False
    following = schedule.actions[to_rank][next_position : next_position + 1]
    return any(isinstance(action, Action) and action.kind is K.BACKWARD for action in following)


def _send_after(part: Action, schedule: Schedule) -> Action | None:
    if part.kind is K.FORWARD and schedule.is_transfer(part.stage):
        return Action(K.SEND_FORWARD, part.stage, part.microbatch)
    if part.kind in BACKWARDS and schedule.is_transfer(part.stage - 1):
        return Action(K.SEND_BACKWARD, part.stage, part.microbatch)
    return None


def _with_frees(row: Sequence[Action | Overlap], schedule: Schedule, *, release: bool) -> Row:
    last = last_use(row)
    lowered: Row = []
    at_the_end: Row = []
    sent: dict[int, Action] = {}  # per stage, the output on its way
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
                (lowered if release else at_the_end).extend(freed)
    if not release:
        lowered = [action for action in lowered if action.parts()[0].kind is not K.FREE_OUTPUT]
        outputs = [part for action in row for part in action.parts() if part.kind is K.SEND_FORWARD]
        return [*lowered, *at_the_end, *(Action(K.FREE_OUTPUT, part.stage, part.microbatch) for part in outputs)]
    return [*lowered, *sent.values()]


def _with_sharding(row: Row, options: LowerOptions) -> Row:
    """UNSHARD before a stage's first computation; REDUCE and RESHARD after its last, and after what is sent then: the
    stage before waits for it."""
    if not options.reduces:
        return row
    last: dict[int, int] = {}
    for position, action in enumerate(row):
        for part in action.parts():
            if part.kind in COMPUTE:
                last[part.stage] = position
    lowered: Row = []
    ending: Row = []
    begun: set[int] = set()
    for position, action in enumerate(row):
        is_compute = action.parts()[0].kind in COMPUTE
        if is_compute:
            lowered += ending
            ending = []
        for part in action.parts():
            if options.keeps_unsharded and is_compute and part.stage not in begun:
                begun.add(part.stage)
                lowered.append(Action(K.UNSHARD, part.stage))
        lowered.append(action)
        # Both parts of an overlap may be of one stage: it ends once. An evaluation has nothing to reduce.
        ended = {part.stage: part for part in action.parts() if is_compute and last[part.stage] == position}
        for stage, part in ended.items():
            ending += [Action(K.REDUCE, stage)] * (part.kind is not K.FORWARD)
            ending += [Action(K.RESHARD, stage)] * options.keeps_unsharded
    return [*lowered, *ending]


def _with_shared(rows: list[Row], schedule: Schedule, shared: tuple[tuple[int, ...], ...]) -> list[Row]:
    """Groups in the same order on all ranks, after everything else: nothing waits for them. One action a rank, named
    by the first of the group's stages there."""
    for group in shared:
        on_ranks = {schedule.stage_ranks[stage]: stage for stage in reversed(group)}
        for rank, stage in on_ranks.items():
            rows[rank].append(Action(K.SYNC_SHARED, stage))
    return rows


def _with_slots(row: Row) -> Row:
    """Give each receive the lowest buffer that is free, from its receive to its free."""
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
            action = replace(action, slot=slot)
        elif action.kind in filled:
            kind = filled[action.kind]
            heapq.heappush(free[kind], slots[kind, action.stage, action.microbatch])
        lowered.append(action)
    return lowered
