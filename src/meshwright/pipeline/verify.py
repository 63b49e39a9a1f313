"""Whether a table computes each gradient once, in an order that comes to its end: what is checked before it runs.

A table of compute only must name every piece of work once, in an order that its data allows. A lowered one must also
move everything between ranks in the same order on both ends, never stop in a circle of ranks that wait (see
`rendezvous`), and use only what is there (`verify_memory`). The checks go from the simple to the subtle, so that the
first one to fail is the one to mend.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, OF_A_STAGE, RECVS, SENDS, Action, ActionKind, Overlap
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.verify_buffers import check_memory
from meshwright.pipeline.verify_deadlock import check_no_circle
from meshwright.pipeline.verify_error import Place, before, fault

K = ActionKind
Places = Mapping[tuple[ActionKind, int, int], Place]
"""Where the action of a kind, stage and micro-batch stands."""

ONCE = "each stage has, for each micro-batch, one F and either one B or one I and one W"
ONCE_FORWARD = "in an evaluation each stage has one F for each micro-batch, and no backward"


def verify(schedule: Schedule, *, trains: bool = True, shared: Sequence[Sequence[int]] | None = None) -> None:
    """See that a table, of compute only or lowered, does the whole step right and comes to its end.

    Args:
        schedule: the table.
        trains: False for an evaluation's, which has forwards only.
        shared: groups of stages with a copy of the same parameter each, which a table doesn't name. With them a lowered
            table must sync each group once, in this order on all ranks; left out, what can be seen without is checked.

    Raises:
        ScheduleError: it doesn't: what, at which rank, position (from 1) and action, the rule, and a fix.
    """
    _check_numbers(schedule)
    _check_on_rank(schedule)
    places = _places(schedule)
    _check_overlaps(schedule)
    _check_compute_order(schedule, places)
    if trains:
        _check_complete(schedule, places)
    else:
        _check_forwards(schedule, places)
    if schedule.is_lowered:
        _check_both_ends(schedule, places)
        check_memory(schedule, shared)
        _check_channels(schedule, places)
    check_no_circle(schedule)


def _check_numbers(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1:
        raise ScheduleError(
            f"a table of {schedule.num_microbatches} micro-batches", rule="at least one", fix="num_microbatches=1"
        )
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"stage {stage} is on rank {rank} of a table with {schedule.num_ranks} rows",
                where=f"stage_ranks[{stage}]",
                rule="a table has a row for each rank, and every stage is on one of them",
                fix=f"a rank from 0 to {schedule.num_ranks - 1}, or a row for rank {rank}",
            )
    for rank in range(schedule.num_ranks):
        if rank not in schedule.stage_ranks:
            raise ScheduleError(
                f"rank {rank} has no stage",
                where=f"rank {rank}",
                rule="a table has a row for each rank, and every rank has a stage",
                fix=f"a table for {len(set(schedule.stage_ranks))} ranks",
            )


def _check_on_rank(schedule: Schedule) -> None:
    """Each action is of a stage of its rank, and of a micro-batch of the step."""
    last = schedule.num_microbatches - 1
    for rank, position, part in schedule.positions():
        place = Place(rank, position)
        if not 0 <= part.stage < schedule.num_stages or schedule.stage_ranks[part.stage] != rank:
            own = ", ".join(map(str, schedule.stages_of(rank)))
            there = 0 <= part.stage < schedule.num_stages
            what = f"which is on rank {schedule.stage_ranks[part.stage]}" if there else "which the table has not"
            rule = "a rank works on its own stages"
            raise fault(place, part, f"is of stage {part.stage}, {what}", rule=rule, fix=f"a stage of {own}")
        if part.kind in OF_A_STAGE:
            if part.microbatch >= 0:
                rule = f"{part.kind.value} is of a stage as a whole"
                raise fault(place, part, "has a micro-batch", rule=rule, fix=f"{part.stage}{part.kind.value}")
        elif not 0 <= part.microbatch <= last:
            what = f"is of micro-batch {part.microbatch} of {schedule.num_microbatches}"
            raise fault(place, part, what, rule="micro-batches are numbered from 0", fix=f"a number from 0 to {last}")


def _places(schedule: Schedule) -> dict[tuple[ActionKind, int, int], Place]:
    """Where everything that has a micro-batch stands, which is once."""
    places: dict[tuple[ActionKind, int, int], Place] = {}
    for rank, position, part in schedule.positions():
        if part.kind in OF_A_STAGE:
            continue
        place = Place(rank, position)
        first = places.setdefault((part.kind, part.stage, part.microbatch), place)
        if first is not place:
            rule = ONCE if part.kind in COMPUTE else "each transfer and each free comes once"
            what = f"comes a second time, after position {first.position + 1}"
            raise fault(place, part, what, rule=rule, fix="one of them")
    return places


def _check_overlaps(schedule: Schedule) -> None:
    """The two of an overlap run together, so neither may feed the other."""
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if not isinstance(action, Overlap):
                continue
            place = Place(rank, position)
            for part in action.parts():
                if part.kind not in COMPUTE:
                    rule = "two computations can overlap, and nothing else"
                    raise fault(place, action, f"overlaps {part}", rule=rule, fix=f"{part} by itself")
            for part, other in (action.parts(), action.parts()[::-1]):
                if (other.kind, other.stage, other.microbatch) in set(_local_needs(part, schedule, rank)):
                    raise fault(
                        place, action, f"overlaps {part} with {other}, which it needs",
                        rule="the two of an overlap are independent", fix=f"{other} and then {part}",
                    )  # fmt: skip


def _local_needs(part: Action, schedule: Schedule, rank: int) -> Iterator[tuple[ActionKind, int, int]]:
    """What must have been computed before, as far as it is on this rank; of B and I whichever the table has."""
    stage, m = part.stage, part.microbatch
    if part.kind is K.FORWARD and stage > 0 and schedule.stage_ranks[stage - 1] == rank:
        yield K.FORWARD, stage - 1, m
    elif part.kind in BACKWARDS:
        yield K.FORWARD, stage, m
        if stage + 1 < schedule.num_stages and schedule.stage_ranks[stage + 1] == rank:
            yield from ((kind, stage + 1, m) for kind in (K.BACKWARD, K.BACKWARD_INPUT))
    elif part.kind is K.BACKWARD_WEIGHT:
        yield K.BACKWARD_INPUT, stage, m


def _check_compute_order(schedule: Schedule, places: Places) -> None:
    """On a rank, what is needed comes first: a B or I after its F, a W after its I, hand-overs between its stages."""
    for rank, position, part in schedule.positions():
        if part.kind not in COMPUTE:
            continue
        place = Place(rank, position)
        for kind, stage, m in _local_needs(part, schedule, rank):
            needed = places.get((kind, stage, m))
            name = f"{stage}{kind.value}{m}"
            if needed is not None and needed.position >= position:
                what = f"comes before {name} (position {needed.position + 1}), which it needs"
            elif needed is None and stage == part.stage:
                what = f"needs {name}, which rank {rank} never does"
            else:
                continue
            rule = "a forward, then its backward or I, then its W; what a stage hands over comes before its use"
            raise fault(place, part, what, rule=rule, fix=f"{name}{before(position)}")


def _check_complete(schedule: Schedule, places: Places) -> None:
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            has = {kind for kind in COMPUTE if (kind, stage, m) in places}
            if has in ({K.FORWARD, K.BACKWARD}, {K.FORWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT}):
                continue
            if not has:
                raise _missing(schedule, stage, m, ONCE)
            if {K.BACKWARD, K.BACKWARD_INPUT} <= has:
                wrong, what = K.BACKWARD_INPUT, f"comes beside {stage}B{m}, which does its work too"
                fix = f"{stage}B{m}, or {stage}I{m} and {stage}W{m}"
            else:
                wrong = K.BACKWARD_INPUT if K.BACKWARD_INPUT in has else K.FORWARD
                lost = f"{stage}{'B' if wrong is K.FORWARD else 'W'}{m}"
                what, fix = f"has no {lost}", f"{lost} after position {places[wrong, stage, m].position + 1}"
            raise fault(places[wrong, stage, m], Action(wrong, stage, m), what, rule=ONCE, fix=fix)


def _check_forwards(schedule: Schedule, places: Places) -> None:
    for (kind, stage, m), place in places.items():
        if kind in COMPUTE and kind is not K.FORWARD:
            fix = f"no {stage}{kind.value}{m}, or verify it with trains=True"
            raise fault(place, Action(kind, stage, m), "is part of a backward", rule=ONCE_FORWARD, fix=fix)
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            if (K.FORWARD, stage, m) not in places:
                raise _missing(schedule, stage, m, ONCE_FORWARD)


def _missing(schedule: Schedule, stage: int, microbatch: int, rule: str) -> ScheduleError:
    rank = schedule.stage_ranks[stage]
    name = f"{stage}F{microbatch}"
    where = f"rank {rank}, none of its {len(schedule.actions[rank])} positions"
    return ScheduleError(f"{name} is missing", where=where, rule=rule, fix=f"{name} on rank {rank}")


def _check_both_ends(schedule: Schedule, places: Places) -> None:
    """Transfers are between stages on different ranks, and have both a send and a receive."""
    for rank, position, action in schedule.positions():
        if action.kind not in SENDS and action.kind not in RECVS:
            continue
        place = Place(rank, position)
        peer = action.peer()
        if not 0 <= peer.stage < schedule.num_stages:
            what = f"has nobody to go to or come from: there is no stage {peer.stage}"
            raise fault(place, action, what, rule="transfers are between neighbouring stages", fix=f"no {action}")
        if schedule.stage_ranks[peer.stage] == rank:
            what = f"is for stage {peer.stage}, which is on rank {rank} too"
            raise fault(place, action, what, rule="stages on one rank hand over without a transfer", fix=f"no {action}")
        if (peer.kind, peer.stage, peer.microbatch) not in places:
            other = schedule.stage_ranks[peer.stage]
            what = f"has no {peer} on rank {other}, and would wait for ever"
            raise fault(place, action, what, rule="a transfer has both its ends", fix=f"{peer} on rank {other}")


def _check_channels(schedule: Schedule, places: Places) -> None:
    """A channel (from a rank, to a rank, forward or backward) has no names: what is sent first is received first."""
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
            receive, place = expected.peer(), places[send.kind, send.stage, send.microbatch]
            there = places[receive.kind, receive.stage, receive.microbatch]
            what = f"would be taken for {expected}: at its turn {receive} is received ({there})"
            rule = f"from rank {channel[0]} to rank {channel[1]}, {send.kind.value}s come in one order on both ends"
            raise fault(place, send, what, rule=rule, fix=f"{expected} first, or {send.peer()} before {receive}")
