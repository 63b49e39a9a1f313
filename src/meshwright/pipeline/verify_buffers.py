"""Whether every rank of a lowered table uses only what is there: buffers, outputs, parameters, finished gradients.

[Note: what is held] A received input is in its slot from RECV_F to FREE_IN and is used by F, B or I, and W; a received
gradient from RECV_B to FREE_GRAD, used by B or I, and W; an output from F to FREE_OUT, used by SEND_F. The table frees
what crosses ranks and only that: what two stages on one rank hand over is theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import BACKWARDS, COMPUTE, FREES, OF_A_STAGE, RECVS, SENDS, Action, ActionKind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.verify_error import Place, before, fault

K = ActionKind
Key = tuple[ActionKind, int, int]
"""Something held: the kind that frees it, stage and micro-batch."""

NAMES = {K.FREE_INPUT: "an input", K.FREE_GRADIENT: "a gradient", K.FREE_OUTPUT: "an output"}
BROUGHT_BY = {K.FREE_INPUT: K.RECV_FORWARD, K.FREE_GRADIENT: K.RECV_BACKWARD, K.FREE_OUTPUT: K.FORWARD}
FREED_BY = {kind: free for free, kind in BROUGHT_BY.items()}
WAITING = "a group waits there for all its stages; a transfer after it could make ranks wait in a circle"


def check_memory(schedule: Schedule, shared: Sequence[Sequence[int]] | None) -> None:
    """See that each rank's row uses what is there and frees it once.

    Raises:
        ScheduleError: it doesn't.
    """
    reduces = any(part.kind is K.REDUCE for _, _, part in schedule.positions())
    for rank in range(schedule.num_ranks):
        _Rank(schedule, rank, reduces=reduces).check()
    if shared is None:
        _check_partners(schedule)
    else:
        _check_groups(schedule, shared)


class _Rank:
    """One rank's row, walked from its start: what is held now."""

    def __init__(self, schedule: Schedule, rank: int, *, reduces: bool) -> None:
        self._schedule, self._rank, self._reduces = schedule, rank, reduces
        self._row = [
            (position, part) for position, action in enumerate(schedule.actions[rank]) for part in action.parts()
        ]
        self._last_compute = {part.stage: i for i, part in self._row if part.kind in COMPUTE}
        self._gathers = {part.stage for _, part in self._row if part.kind is K.UNSHARD}
        self._held: dict[Key, int] = {}
        self._freed: dict[Key, int] = {}
        self._slots: dict[tuple[ActionKind, int], Action] = {}
        self._slot_of: dict[Key, int] = {}
        self._computed: set[tuple[ActionKind, int, int]] = set()
        self._unsharded: dict[int, int] = {}
        self._reduced: dict[int, int] = {}
        self._shared: Action | None = None

    def check(self) -> None:
        for position, part in self._row:
            place = Place(self._rank, position)
            if part.kind in COMPUTE:
                self._compute(place, part)
            elif part.kind in SENDS:
                self._send(place, part)
            elif part.kind in RECVS:
                self._receive(place, part)
            elif part.kind in FREES:
                self._free(place, part)
            elif part.kind in OF_A_STAGE:
                self._of_a_stage(place, part)
        self._end()

    def _compute(self, place: Place, part: Action) -> None:
        stage, m = part.stage, part.microbatch
        if stage in self._gathers and stage not in self._unsharded:
            rule = "a stage's parameters are used between its UNSHARD and its RESHARD"
            what = f"uses the parameters of stage {stage}, which are sharded"
            raise fault(place, part, what, rule=rule, fix=f"{stage}UNSHARD{before(place.position)}")
        if self._schedule.is_transfer(stage - 1):
            self._use(place, part, (K.FREE_INPUT, stage, m))
        if part.kind is not K.FORWARD and self._schedule.is_transfer(stage):
            self._use(place, part, (K.FREE_GRADIENT, stage, m))
        if part.kind is K.FORWARD and self._schedule.is_transfer(stage):
            self._held[K.FREE_OUTPUT, stage, m] = place.position
        self._computed.add((part.kind, stage, m))

    def _use(self, place: Place, part: Action, key: Key) -> None:
        if key in self._held:
            return
        free, stage, m = key
        name = f"{stage}{BROUGHT_BY[free].value}{m}"
        if key in self._freed:
            what = f"uses {NAMES[free]} that is freed at position {self._freed[key] + 1}"
            rule, fix = "nothing is used after it is freed", f"{stage}{free.value}{m} after its last use"
        else:
            what = f"uses {NAMES[free]} that has not come: {name} is not before it"
            rule, fix = "what is received comes before its use", f"{name}{before(place.position)}"
        raise fault(place, part, what, rule=rule, fix=fix)

    def _send(self, place: Place, part: Action) -> None:
        makers = (K.FORWARD,) if part.kind is K.SEND_FORWARD else tuple(sorted(BACKWARDS, key=lambda kind: kind.value))
        if not any((kind, part.stage, part.microbatch) in self._computed for kind in makers):
            names = " or ".join(f"{part.stage}{kind.value}{part.microbatch}" for kind in makers)
            rule = "a send comes after the computation that makes what is sent"
            what = f"sends what {names} has not made yet"
            raise fault(place, part, what, rule=rule, fix=f"{names}{before(place.position)}")
        if part.kind is K.SEND_FORWARD:
            self._use(place, part, (K.FREE_OUTPUT, part.stage, part.microbatch))
        self._no_more_after_shared(place, part)

    def _receive(self, place: Place, part: Action) -> None:
        self._no_more_after_shared(place, part)
        if part.slot is None or part.slot < 0:
            rule = "a receive fills a buffer of its rank, by number"
            raise fault(place, part, "has no buffer slot", rule=rule, fix=f"{part}@0, or what lower gives")
        key = (FREED_BY[part.kind], part.stage, part.microbatch)
        other = self._slots.setdefault((part.kind, part.slot), part)
        if other is not part:
            held = (FREED_BY[part.kind], other.stage, other.microbatch)
            what = f"fills slot {part.slot}, where {other} is from position {self._held[held] + 1} on"
            rule = "a buffer slot holds one thing at a time, from its receive to its free"
            free = f"{other.stage}{held[0].value}{other.microbatch}"
            raise fault(place, part, what, rule=rule, fix=f"another slot, or {free}{before(place.position)}")
        self._held[key] = place.position
        self._slot_of[key] = part.slot

    def _free(self, place: Place, part: Action) -> None:
        key = (part.kind, part.stage, part.microbatch)
        if key not in self._held:  # a second free of the same is a second action of one name: found before
            maker = f"{part.stage}{BROUGHT_BY[part.kind].value}{part.microbatch}"
            crosses = self._schedule.is_transfer(part.stage - 1 if part.kind is K.FREE_INPUT else part.stage)
            why = f"{maker} is not before it" if crosses else "it does not go between ranks"
            what = f"frees {NAMES[part.kind]} that is not there: {why}"
            fix = f"{maker}{before(place.position)}" if crosses else f"no {part}"
            raise fault(place, part, what, rule="only what is held is freed", fix=fix)
        del self._held[key]
        self._freed[key] = place.position
        if key in self._slot_of:
            del self._slots[BROUGHT_BY[part.kind], self._slot_of.pop(key)]

    def _of_a_stage(self, place: Place, part: Action) -> None:
        stage = part.stage
        if part.kind is K.UNSHARD:
            if stage in self._unsharded:
                what = f"gathers parameters that are there since position {self._unsharded[stage] + 1}"
                rule = "after an UNSHARD of a stage comes its RESHARD"
                raise fault(place, part, what, rule=rule, fix=f"{stage}RESHARD{before(place.position)}")
            self._unsharded[stage] = place.position
        elif part.kind is K.RESHARD:
            if self._unsharded.pop(stage, None) is None:
                rule = "before a RESHARD of a stage comes its UNSHARD"
                raise fault(place, part, "frees parameters that are not gathered", rule=rule, fix=f"no {part}")
        elif part.kind is K.REDUCE:
            self._reduce(place, part)
        else:
            self._sync(place, part)

    def _reduce(self, place: Place, part: Action) -> None:
        last = self._last_compute[part.stage]
        if place.position < last:
            raise self._too_early(place, part, part.stage, last)
        if part.stage in self._reduced:
            what = f"reduces a second time, after position {self._reduced[part.stage] + 1}"
            raise fault(place, part, what, rule="a stage's gradients are reduced once", fix="one of them")
        self._reduced[part.stage] = place.position

    def _sync(self, place: Place, part: Action) -> None:
        """It comes once a rank and group, named by any of the group's stages there: so all of them must be done."""
        for stage, last in self._last_compute.items():
            if place.position < last:
                raise self._too_early(place, part, stage, last)
            if self._reduces and stage not in self._reduced:
                rule = "shared gradients are added up over stages when each stage's are reduced"
                fix = f"{stage}REDUCE{before(place.position)}"
                raise fault(place, part, f"comes without {stage}REDUCE before it", rule=rule, fix=fix)
        self._shared = part

    def _too_early(self, place: Place, part: Action, stage: int, last: int) -> ScheduleError:
        what = f"comes before the last backward of stage {stage} (position {last + 1})"
        rule = "a stage's gradients leave it when they are complete"
        return fault(place, part, what, rule=rule, fix=f"{part} after position {last + 1}")

    def _no_more_after_shared(self, place: Place, part: Action) -> None:
        if self._shared is not None:
            fix = f"{self._shared} after position {place.position + 1}"
            raise fault(place, part, f"comes after {self._shared}", rule=WAITING, fix=fix)

    def _end(self) -> None:
        for (free, stage, m), position in self._held.items():
            maker = next(p for i, p in self._row if i == position and (p.stage, p.microbatch) == (stage, m))
            what = f"brings {NAMES[free]} that is never freed: there is no {stage}{free.value}{m} after it"
            rule = "what goes between ranks is freed by the end of the step"
            fix = f"{stage}{free.value}{m} after its last use"
            raise fault(Place(self._rank, position), maker, what, rule=rule, fix=fix)
        for stage, position in self._unsharded.items():
            rule = "after an UNSHARD of a stage comes its RESHARD"
            action = Action(K.UNSHARD, stage)
            what = "gathers parameters that are never freed"
            raise fault(Place(self._rank, position), action, what, rule=rule, fix=f"{stage}RESHARD at the end")
        for stage in self._schedule.stages_of(self._rank):
            if self._reduces and stage not in self._reduced:
                position = self._last_compute[stage]
                action = next(p for i, p in self._row if i == position and p.stage == stage)
                rule = "where one stage's gradients are reduced, all stages' are"
                what = f"is the last backward of stage {stage}, and no {stage}REDUCE follows"
                fix = f"{stage}REDUCE after position {position + 1}"
                raise fault(Place(self._rank, position), action, what, rule=rule, fix=fix)


def _check_groups(schedule: Schedule, shared: Sequence[Sequence[int]]) -> None:
    """Each rank syncs each group that has stages there, once, by the first of them, in the order of the groups."""
    rule = f"groups {', '.join(str(tuple(group)) for group in shared)} sync once each, in one order on all ranks"
    found: dict[int, list[tuple[int, Action]]] = defaultdict(list)
    for rank, position, part in schedule.positions():
        if part.kind is K.SYNC_SHARED:
            found[rank].append((position, part))
    for rank, row in enumerate(schedule.actions):
        own = [[stage for stage in group if schedule.stage_ranks[stage] == rank] for group in shared]
        wanted = [Action(K.SYNC_SHARED, stages[0]) for stages in own if stages]
        for (position, part), expected in zip(found[rank], [*wanted, *[None] * len(found[rank])], strict=False):
            if part != expected:
                what = "comes where no group has its turn" if expected is None else f"comes in the turn of {expected}"
                raise fault(Place(rank, position), part, what, rule=rule, fix=f"{expected or 'nothing'} here")
        for expected in wanted[len(found[rank]) :]:
            where, fix = f"rank {rank}, after position {len(row)}, {expected}", f"{expected} at the end of rank {rank}"
            raise ScheduleError(f"{expected} is missing on rank {rank}", where=where, rule=rule, fix=fix)


def _check_partners(schedule: Schedule) -> None:
    """A stage syncs once in each of its groups, which other ranks have a part in, or at least another stage here.

    The table doesn't name groups. So what can be seen is that a stage syncs more often than it has partners.
    """
    synced = Counter((rank, part.stage) for rank, _, part in schedule.positions() if part.kind is K.SYNC_SHARED)
    for rank, position, part in schedule.positions():
        if part.kind is not K.SYNC_SHARED:
            continue
        elsewhere = sum(times for (other, _), times in synced.items() if other != rank)
        partners = elsewhere + (len(schedule.stages_of(rank)) > 1)
        times = synced[rank, part.stage]
        if times > partners:
            raise fault(
                Place(rank, position), part, f"comes {times} times, and other ranks sync {elsewhere} times",
                rule="a group syncs once on each rank that has one of its stages",
                fix="a SYNC_SHARED on each of the group's ranks",
            )  # fmt: skip
