"""Verify, before a table runs, that each gradient is computed exactly once and no rank deadlocks.

A compute-only table must contain each computation once, in an order that respects data dependencies. A lowered table
must also have its transfers in the same order on both ends without deadlock, and use only live
buffers (`verify_buffers`). Checks run from simple to subtle, so that the first failure is the one to fix.

[Note: rendezvous] A send blocks until its receive is reached, and vice versa. Backends may behave like this (NCCL does
for large messages, gloo never), so a table must tolerate it. Only an adjacent send and receive with the same peer are
posted together, as a batch that returns when both are complete. Progress is monotonic, so the order in which ranks
advance here does not matter: if the ranks get stuck in one order, they get stuck in every order.

In a compute-only table, results are transferred immediately, and a deadlock is a cycle of data dependencies.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, RECVS, SENDS, STAGE_LEVEL, Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.verify_buffers import ActionLocation, before, check_buffers, violation
from meshwright.units import counted

K = ActionKind
ActionLocations = Mapping[tuple[ActionKind, int, int], ActionLocation]
"""Locations of actions by kind, stage and micro-batch."""

ONCE = "each stage has, for each micro-batch, one F and either one B or one I and one W"
ONCE_FORWARD = "in an evaluation each stage has one F per micro-batch, and no backward"


def verify(schedule: Schedule, *, trains: bool = True, shared: Sequence[Sequence[int]] | None = None) -> None:
    """Check that a compute-only or lowered table performs a complete, correct step without deadlock.

    Args:
        trains: False for an evaluation, which has forwards only.
        shared: groups of stages that share parameters, which the table does not contain. A lowered table must sync each
            group once, in this order on all ranks. None limits the check to what the table alone shows.

    Raises:
        ScheduleError: the table violates a rule; the message gives the action, rank, position (from 1), rule and fix.
    """
    _check_numbers(schedule)
    _check_on_rank(schedule)
    locations = _action_locations(schedule)
    _check_overlaps(schedule)
    _check_compute_order(schedule, locations)
    if trains:
        _check_complete(schedule, locations)
    else:
        _check_forwards(schedule, locations)
    if schedule.is_lowered:
        _check_both_ends(schedule, locations)
        check_buffers(schedule, shared)
        _check_channels(schedule, locations)
    check_no_deadlock(schedule)


def _check_numbers(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        what = f"the table has {counted(schedule.num_microbatches, 'micro-batch')}"
        raise ScheduleError(what, rule="num_microbatches must be at least 1", fix="num_microbatches=1")
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"stage {stage} is on rank {rank} of a table with {counted(schedule.num_ranks, 'row')}",
                where=f"stage_ranks[{stage}]",
                rule="a table has one row per rank, and each stage is on one of these ranks",
                fix=f"use a rank from 0 to {schedule.num_ranks - 1}, or add a row for rank {rank}",
            )
    for rank in range(schedule.num_ranks):
        if rank not in schedule.stage_ranks:
            raise ScheduleError(
                f"rank {rank} has no stage",
                where=f"rank {rank}",
                rule="a table has one row per rank, and each rank has at least one stage",
                fix=f"use a table for {counted(len(set(schedule.stage_ranks)), 'rank')}",
            )


def _check_on_rank(schedule: Schedule) -> None:
    """Check that each action belongs to a stage on its rank and to an existing micro-batch."""
    last = schedule.num_microbatches - 1
    for rank, position, part in schedule.positions():
        loc = ActionLocation(rank, position)
        if not 0 <= part.stage < schedule.num_stages or schedule.stage_ranks[part.stage] != rank:
            local_stages = ", ".join(map(str, schedule.stages_of(rank)))
            exists = 0 <= part.stage < schedule.num_stages
            what = f"which is on rank {schedule.stage_ranks[part.stage]}" if exists else "which does not exist"
            rule, fix = "a rank runs actions of its own stages only", f"use stage {local_stages}"
            raise violation(loc, part, f"belongs to stage {part.stage}, {what}", rule=rule, fix=fix)
        if part.kind in STAGE_LEVEL:
            if part.microbatch >= 0:
                rule = f"{part.kind.value} applies to a stage, not to a micro-batch"
                raise violation(loc, part, "has a micro-batch", rule=rule, fix=f"{part.stage}{part.kind.value}")
        elif not 0 <= part.microbatch <= last:
            what = f"has micro-batch {part.microbatch} of {schedule.num_microbatches}"
            raise violation(loc, part, what, rule="micro-batches are numbered from 0", fix=f"use 0 to {last}")


def _action_locations(schedule: Schedule) -> dict[tuple[ActionKind, int, int], ActionLocation]:
    """Return the location of each action with a micro-batch, checking that no action occurs twice."""
    locations: dict[tuple[ActionKind, int, int], ActionLocation] = {}
    for rank, position, part in schedule.positions():
        if part.kind in STAGE_LEVEL:
            continue
        loc = ActionLocation(rank, position)
        first = locations.setdefault((part.kind, part.stage, part.microbatch), loc)
        if first is not loc:
            rule = ONCE if part.kind in COMPUTE else "each transfer and each free appears once"
            what = f"appears a second time, after position {first.position + 1}"
            raise violation(loc, part, what, rule=rule, fix="remove one of them")
    return locations


def _check_overlaps(schedule: Schedule) -> None:
    """Check that overlapped actions do not depend on each other."""
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if not isinstance(action, Overlap):
                continue
            loc = ActionLocation(rank, position)
            for part in action.parts():
                if part.kind not in COMPUTE:
                    rule = "only computations can overlap"
                    raise violation(loc, action, f"overlaps {part}", rule=rule, fix=f"move {part} out of the overlap")
            for part, other in (action.parts(), action.parts()[::-1]):
                if (other.kind, other.stage, other.microbatch) in set(_local_needs(part, schedule, rank)):
                    raise violation(
                        loc, action, f"overlaps {part} with {other}, on which it depends",
                        rule="overlapped actions are independent", fix=f"run {other} before {part}",
                    )  # fmt: skip


def _local_needs(part: Action, schedule: Schedule, rank: int) -> Iterator[tuple[ActionKind, int, int]]:
    """Yield a computation's dependencies on the same rank; for a backward both B and I, only one of which exists."""
    stage, m = part.stage, part.microbatch
    if part.kind is K.FORWARD and stage > 0 and schedule.stage_ranks[stage - 1] == rank:
        yield K.FORWARD, stage - 1, m
    elif part.kind in BACKWARDS:
        yield K.FORWARD, stage, m
        if stage + 1 < schedule.num_stages and schedule.stage_ranks[stage + 1] == rank:
            yield from ((kind, stage + 1, m) for kind in (K.BACKWARD, K.BACKWARD_INPUT))
    elif part.kind is K.BACKWARD_WEIGHT:
        yield K.BACKWARD_INPUT, stage, m


def _check_compute_order(schedule: Schedule, locations: ActionLocations) -> None:
    """Check dependencies within a rank: F before B or I, I before W, and results passed between its stages."""
    for rank, position, part in schedule.positions():
        if part.kind not in COMPUTE:
            continue
        loc = ActionLocation(rank, position)
        for kind, stage, m in _local_needs(part, schedule, rank):
            needed = locations.get((kind, stage, m))
            name = f"{stage}{kind.value}{m}"
            if needed is not None and needed.position >= position:
                what = f"comes before {name} (position {needed.position + 1}), on which it depends"
            elif needed is None and stage == part.stage:
                what = f"depends on {name}, which rank {rank} never runs"
            else:
                continue
            rule = "F comes before its B or I, I before its W, and a stage's result before its use"
            fix = f"put {name}{before(position)}"
            if kind is K.BACKWARD_INPUT and needed is None and (K.BACKWARD, stage, m) in locations:
                fix = f"remove {part}, since {stage}B{m} computes it too, or use {name} instead of {stage}B{m}"
            raise violation(loc, part, what, rule=rule, fix=fix)


def _check_complete(schedule: Schedule, locations: ActionLocations) -> None:
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            kinds = {kind for kind in COMPUTE if (kind, stage, m) in locations}
            if kinds in ({K.FORWARD, K.BACKWARD}, {K.FORWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT}):
                continue
            if not kinds:
                raise _missing(schedule, stage, m, ONCE)
            if {K.BACKWARD, K.BACKWARD_INPUT} <= kinds:
                wrong, what = K.BACKWARD_INPUT, f"duplicates the work of {stage}B{m}"
                others = f"{stage}I{m} and {stage}W{m}" if K.BACKWARD_WEIGHT in kinds else f"{stage}I{m}"
                fix = f"remove {others}, or use {stage}I{m} and {stage}W{m} without {stage}B{m}"
            else:
                wrong = K.BACKWARD_INPUT if K.BACKWARD_INPUT in kinds else K.FORWARD
                missing = f"{stage}{'B' if wrong is K.FORWARD else 'W'}{m}"
                position = locations[wrong, stage, m].position
                place = _place_of_backward(locations, stage, m, position) if wrong is K.FORWARD else ""
                what, fix = f"has no {missing}", f"add {missing}{place or f' after position {position + 1}'}"
            raise violation(locations[wrong, stage, m], Action(wrong, stage, m), what, rule=ONCE, fix=fix)


def _place_of_backward(locations: ActionLocations, stage: int, m: int, forward: int) -> str:
    """Return where a missing backward can run, beside another micro-batch's; empty if there is none after the forward.

    Right after its forward, other ranks might wait for forwards that come later.
    """
    following, previous = (locations.get((K.BACKWARD, stage, n)) for n in (m + 1, m - 1))
    if following is not None and following.position > forward:
        return before(following.position)
    return f" after position {previous.position + 1}" if previous is not None and previous.position > forward else ""


def _check_forwards(schedule: Schedule, locations: ActionLocations) -> None:
    for (kind, stage, m), loc in locations.items():
        if kind in COMPUTE and kind is not K.FORWARD:
            fix = f"remove {stage}{kind.value}{m}, or verify with trains=True"
            raise violation(loc, Action(kind, stage, m), "is part of a backward", rule=ONCE_FORWARD, fix=fix)
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            if (K.FORWARD, stage, m) not in locations:
                raise _missing(schedule, stage, m, ONCE_FORWARD)


def _missing(schedule: Schedule, stage: int, microbatch: int, rule: str) -> ScheduleError:
    rank = schedule.stage_ranks[stage]
    name = f"{stage}F{microbatch}"
    where = f"rank {rank}, not at any of its {counted(len(schedule.actions[rank]), 'position')}"
    return ScheduleError(f"{name} is missing", where=where, rule=rule, fix=f"add {name} on rank {rank}")


def _check_both_ends(schedule: Schedule, locations: ActionLocations) -> None:
    """Check that transfers connect stages on different ranks and have both a send and a receive."""
    for rank, position, action in schedule.positions():
        if action.kind not in SENDS and action.kind not in RECVS:
            continue
        loc = ActionLocation(rank, position)
        peer = action.peer()
        if not 0 <= peer.stage < schedule.num_stages:
            what = f"has no peer: stage {peer.stage} does not exist"
            raise violation(loc, action, what, rule="transfers connect neighbouring stages", fix=f"remove {action}")
        if schedule.stage_ranks[peer.stage] == rank:
            what = f"is a transfer with stage {peer.stage}, which is also on rank {rank}"
            raise violation(loc, action, what, rule="stages on the same rank need no transfer", fix=f"remove {action}")
        if (peer.kind, peer.stage, peer.microbatch) not in locations:
            missing = f"{peer} on rank {schedule.stage_ranks[peer.stage]}"
            what = f"has no matching {missing}, and would block forever"
            raise violation(loc, action, what, rule="sends and receives come in pairs", fix=f"add {missing}")


def _check_channels(schedule: Schedule, locations: ActionLocations) -> None:
    """Check that each FIFO channel (source, destination, direction) is used in the same order on both ends."""
    sent: dict[tuple[int, int, ActionKind], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int, ActionKind], list[Action]] = defaultdict(list)
    for rank, _, part in schedule.positions():
        if part.kind in SENDS:
            sent[rank, schedule.stage_ranks[part.peer().stage], part.kind].append(part)
        elif part.kind in RECVS:
            send = part.peer()
            received[schedule.stage_ranks[send.stage], rank, send.kind].append(send)
    for channel, sends in sent.items():
        for send, expected in zip(sends, received[channel], strict=True):
            if send == expected:
                continue
            receive, loc = expected.peer(), locations[send.kind, send.stage, send.microbatch]
            receive_location = locations[receive.kind, receive.stage, receive.microbatch]
            what = f"would be received as {expected}, by {receive} ({receive_location})"
            rule = f"{send.kind.value}s from rank {channel[0]} to rank {channel[1]} are received in send order"
            raise violation(loc, send, what, rule=rule, fix=f"send {expected} before {send}")


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
    locations = {
        str(part._replace(slot=None)): ActionLocation(of_rank, position)
        for of_rank, position, part in schedule.positions()
    }
    needed = _name(missing[rank], schedule)
    needed_at = f" ({locations[needed]})" if needed in locations else ""
    what = f"{len(stuck)} of {len(rows)} ranks deadlock: {waits}"
    rule = RULE_LOWERED if schedule.is_lowered else "everything an action depends on can run before it"
    fix = f"move {needed}{needed_at} earlier on its rank, or {step} later"
    raise ScheduleError(what, where=f"{ActionLocation(rank, step.position)}, {step}", rule=rule, fix=fix)


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
