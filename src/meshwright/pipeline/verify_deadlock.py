"""Deadlock detection between the ranks of a table.

[Note: rendezvous] A send blocks until its receive is reached, and vice versa. Backends may behave like this (NCCL does
for large messages, gloo never), so a table must tolerate it. Only an adjacent send and receive with the same peer are
posted together, as a batch that returns when both are complete. Progress is monotonic, so the order in which ranks
advance here does not matter: if the ranks get stuck in one order, they get stuck in every order.

In a compute-only table, results are transferred immediately, and a deadlock is a cycle of data dependencies.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, RECVS, SENDS, Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.verify_error import ActionLocation

K = ActionKind
Key = tuple[str, int, int]
"""Key of a transfer end or a result: kind, stage and micro-batch."""

BACKWARD_SIDE = "B"
TRANSFERS = SENDS | RECVS


@dataclass(frozen=True)
class _BlockingStep:
    """Unit of progress of a rank: a single action or a batch of transfers."""

    position: int
    actions: tuple[Action | Overlap, ...]
    posts: tuple[Key, ...] = ()
    """Keys that become visible to other ranks as soon as the step is reached."""
    needs: tuple[Key, ...] = ()
    provides: tuple[Key, ...] = ()
    """Keys that become visible to other ranks when the step is complete."""

    def __str__(self) -> str:
        return " with ".join(map(str, self.actions))


def batches(row: Sequence[Action | Overlap], schedule: Schedule) -> list[tuple[int, int]]:
    """Split a row into (begin, end) batches: single actions and pairs of transfers.

    A pair is an adjacent send and receive with the same peer rank, matched from the left.
    """
    spans, begin = [], 0
    while begin < len(row):
        end = begin + 2 if begin + 1 < len(row) and _are_batched(row[begin], row[begin + 1], schedule) else begin + 1
        spans.append((begin, end))
        begin = end
    return spans


def check_no_deadlock(schedule: Schedule) -> None:
    """Check that all ranks reach the end of their rows.

    Raises:
        ScheduleError: ranks deadlock; the message names each blocked rank and its action.
    """
    if schedule.is_lowered:
        rows = [_transfer_steps(row, schedule) for row in schedule.actions]
    else:
        rows = [_compute_steps(rank, row, schedule) for rank, row in enumerate(schedule.actions)]
    reached, seen = _advance_ranks(rows)
    if all(at == len(row) for at, row in zip(reached, rows, strict=True)):
        return
    stuck = [(rank, row[at]) for rank, (at, row) in enumerate(zip(reached, rows, strict=True)) if at < len(row)]
    waits = "; ".join(f"rank {rank} at position {step.position + 1}, {step}" for rank, step in stuck)
    missing = {rank: next(key for key in step.needs if key not in seen) for rank, step in stuck}
    rank = _rank_on_cycle({rank: schedule.stage_ranks[key[1]] for rank, key in missing.items()})
    step = dict(stuck)[rank]
    needed, locations = _name(missing[rank], schedule), _action_locations(schedule)
    needed_at = f" ({locations[needed]})" if needed in locations else ""
    raise ScheduleError(
        f"{len(stuck)} of {len(rows)} ranks deadlock: {waits}",
        where=f"{ActionLocation(rank, step.position)}, {step}",
        rule=RULE_LOWERED if schedule.is_lowered else "everything an action depends on can run before it",
        fix=f"move {needed}{needed_at} earlier on its rank, or {step} later",
    )


RULE_LOWERED = "a send blocks until its receive is reached and vice versa, except within a batch"


def _advance_ranks(rows: Sequence[Sequence[_BlockingStep]]) -> tuple[list[int], set[Key]]:
    """Return the number of completed steps per rank, and all keys that became visible."""
    seen: set[Key] = set()
    waiting: dict[Key, list[int]] = defaultdict(list)
    reached = [0] * len(rows)
    runnable = deque(range(len(rows)))
    while runnable:
        rank = runnable.popleft()
        row = rows[rank]
        while reached[rank] < len(row):
            step = row[reached[rank]]
            for key in step.posts:
                seen.add(key)
                runnable.extend(waiting.pop(key, ()))
            missing = next((key for key in step.needs if key not in seen), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            for key in step.provides:
                seen.add(key)
                runnable.extend(waiting.pop(key, ()))
            reached[rank] += 1
    return reached, seen


def _rank_on_cycle(waits_for: Mapping[int, int]) -> int:
    """Return the lowest rank on the cycle; stuck ranks outside the cycle only wait for it."""
    rank = next(iter(waits_for))
    for _ in waits_for:  # following as many edges as there are ranks leads into the cycle
        rank = waits_for[rank]
    cycle = {rank}
    while waits_for[rank] not in cycle:
        rank = waits_for[rank]
        cycle.add(rank)
    return min(cycle)


def _transfer_steps(row: tuple[Action | Overlap, ...], schedule: Schedule) -> list[_BlockingStep]:
    """Return the steps that depend on other ranks; `verify` checks dependencies within a rank."""
    steps = []
    for begin, end in batches(row, schedule):
        ends = [part for action in row[begin:end] for part in action.parts() if part.kind in TRANSFERS]
        if ends:
            posts = tuple(_key(part) for part in ends)
            needs = tuple(_key(part.peer()) for part in ends)
            steps.append(_BlockingStep(begin, row[begin:end], posts=posts, needs=needs))
    return steps


def _compute_steps(rank: int, row: Sequence[Action | Overlap], schedule: Schedule) -> list[_BlockingStep]:
    steps = []
    for position, action in enumerate(row):
        needs, provides = [], []
        for part in action.parts():
            is_forward = part.kind is K.FORWARD
            if part.kind is K.BACKWARD_WEIGHT:
                continue
            side = part.kind.value if is_forward else BACKWARD_SIDE
            source = part.stage + (-1 if is_forward else 1)
            if 0 <= source < schedule.num_stages and schedule.stage_ranks[source] != rank:
                needs.append((side, source, part.microbatch))
            provides.append((side, part.stage, part.microbatch))
        steps.append(_BlockingStep(position, (action,), needs=tuple(needs), provides=tuple(provides)))
    return steps


def _are_batched(first: Action | Overlap, second: Action | Overlap, schedule: Schedule) -> bool:
    if isinstance(first, Overlap) or isinstance(second, Overlap):
        return False
    if not (first.kind in SENDS and second.kind in RECVS or first.kind in RECVS and second.kind in SENDS):
        return False
    return schedule.stage_ranks[first.peer().stage] == schedule.stage_ranks[second.peer().stage]


def _key(action: Action) -> Key:
    return action.kind.value, action.stage, action.microbatch


def _name(key: Key, schedule: Schedule) -> str:
    """Return the name of the table action that a key stands for."""
    kind, stage, microbatch = key
    if kind == BACKWARD_SIDE and not schedule.is_lowered:
        for _, _, part in schedule.positions():
            if part.kind in BACKWARDS and (part.stage, part.microbatch) == (stage, microbatch):
                return str(part)
    return f"{stage}{kind}{microbatch}"


def _action_locations(schedule: Schedule) -> dict[str, ActionLocation]:
    """Return the location of each action, keyed by its name without the slot."""
    return {
        str(Action(part.kind, part.stage, part.microbatch)): ActionLocation(rank, position)
        for rank, position, part in schedule.positions()
    }
