"""Whether the ranks of a table ever wait for one another in a circle.

[Note: rendezvous] A send returns when its receive is reached, and a receive when its send is: what a backend may do
(NCCL does for large messages, gloo for none), so what a table must stand. Only a send and a receive with the same peer
that stand next to each other are posted together, as one batch, which returns when both are through. Reaching more
never undoes anything, so it doesn't matter in what order the ranks are run here: if they get stuck, they always do.

In a table of compute only what is computed is handed over at once: there the circle is one of data.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, RECVS, SENDS, Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.verify_error import Place

K = ActionKind
Key = tuple[str, int, int]
"""An end of a transfer or a result: kind, stage and micro-batch."""

BACKWARD_SIDE = "B"
TRANSFERS = SENDS | RECVS


@dataclass(frozen=True)
class _Step:
    """What a rank does at once."""

    position: int
    actions: tuple[Action | Overlap, ...]
    posts: tuple[Key, ...] = ()
    """Others may see these as soon as the step is reached."""
    needs: tuple[Key, ...] = ()
    gives: tuple[Key, ...] = ()
    """Others may see these when the step is through."""

    def __str__(self) -> str:
        return " with ".join(map(str, self.actions))


def batches(row: Sequence[Action | Overlap], schedule: Schedule) -> list[tuple[int, int]]:
    """A row in pieces that are done at once, as begin and end: single actions, and pairs of transfers.

    A pair is a send and a receive with the same peer rank, next to each other, taken from the left.
    """
    pieces, begin = [], 0
    while begin < len(row):
        end = begin + 2 if begin + 1 < len(row) and _are_batched(row[begin], row[begin + 1], schedule) else begin + 1
        pieces.append((begin, end))
        begin = end
    return pieces


def check_no_circle(schedule: Schedule) -> None:
    """See that all ranks get to the end of their rows.

    Raises:
        ScheduleError: they don't; it names every rank that waits, and for what.
    """
    if schedule.is_lowered:
        rows = [_transfer_steps(row, schedule) for row in schedule.actions]
    else:
        rows = [_compute_steps(rank, row, schedule) for rank, row in enumerate(schedule.actions)]
    reached, seen = _run(rows)
    if all(at == len(row) for at, row in zip(reached, rows, strict=True)):
        return
    stuck = [(rank, row[at]) for rank, (at, row) in enumerate(zip(reached, rows, strict=True)) if at < len(row)]
    waits = "; ".join(f"rank {rank} at position {step.position + 1}, {step}" for rank, step in stuck)
    missing = {rank: next(key for key in step.needs if key not in seen) for rank, step in stuck}
    rank = _on_circle({rank: schedule.stage_ranks[key[1]] for rank, key in missing.items()})
    step = dict(stuck)[rank]
    first, places = _name(missing[rank], schedule), _places(schedule)
    other = f" ({places[first]})" if first in places else ""
    raise ScheduleError(
        f"{len(stuck)} of {len(rows)} ranks wait for ever: {waits}",
        where=f"{Place(rank, step.position)}, {step}",
        rule=RULE_LOWERED if schedule.is_lowered else "what an action needs is done by one that can come before it",
        fix=f"{first}{other} earlier on its rank, or {step} later",
    )


RULE_LOWERED = "a send waits until its receive is reached and a receive until its send, but for neighbours in a batch"


def _run(rows: Sequence[Sequence[_Step]]) -> tuple[list[int], set[Key]]:
    """How far each rank gets, and all that was posted or given until then."""
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
            for key in step.gives:
                seen.add(key)
                runnable.extend(waiting.pop(key, ()))
            reached[rank] += 1
    return reached, seen


def _on_circle(waits_for: Mapping[int, int]) -> int:
    """The lowest rank of a circle; the other ranks only wait for one."""
    rank = next(iter(waits_for))
    for _ in waits_for:  # as many steps as there are ranks lead into the circle
        rank = waits_for[rank]
    circle = {rank}
    while waits_for[rank] not in circle:
        rank = waits_for[rank]
        circle.add(rank)
    return min(circle)


def _transfer_steps(row: tuple[Action | Overlap, ...], schedule: Schedule) -> list[_Step]:
    """The steps that wait for others: what the rank itself did is its row's order, which is checked elsewhere."""
    steps = []
    for begin, end in batches(row, schedule):
        ends = [part for action in row[begin:end] for part in action.parts() if part.kind in TRANSFERS]
        if ends:
            posts = tuple(_key(part) for part in ends)
            steps.append(_Step(begin, row[begin:end], posts=posts, needs=tuple(_key(part.peer()) for part in ends)))
    return steps


def _compute_steps(rank: int, row: Sequence[Action | Overlap], schedule: Schedule) -> list[_Step]:
    steps = []
    for position, action in enumerate(row):
        needs, gives = [], []
        for part in action.parts():
            is_forward = part.kind is K.FORWARD
            if part.kind is K.BACKWARD_WEIGHT:
                continue
            side = part.kind.value if is_forward else BACKWARD_SIDE
            source = part.stage + (-1 if is_forward else 1)
            if 0 <= source < schedule.num_stages and schedule.stage_ranks[source] != rank:
                needs.append((side, source, part.microbatch))
            gives.append((side, part.stage, part.microbatch))
        steps.append(_Step(position, (action,), needs=tuple(needs), gives=tuple(gives)))
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
    """The action that a key stands for, as the table has it."""
    kind, stage, microbatch = key
    if kind == BACKWARD_SIDE and not schedule.is_lowered:
        for _, _, part in schedule.positions():
            if part.kind in BACKWARDS and (part.stage, part.microbatch) == (stage, microbatch):
                return str(part)
    return f"{stage}{kind}{microbatch}"


def _places(schedule: Schedule) -> dict[str, Place]:
    """Where each action stands, by its name without a slot."""
    return {
        str(Action(part.kind, part.stage, part.microbatch)): Place(rank, position)
        for rank, position, part in schedule.positions()
    }
