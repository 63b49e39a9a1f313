"""Independent reference executor for lowered tables, with symbolic buffers and blocking transfers.

It shares no code with `verify`: messages on a channel are anonymous, slots hold whatever came last, freed values are
poisoned, and ranks advance one action at a time until none can.
"""

from __future__ import annotations

from collections import defaultdict, deque

from meshwright.pipeline import Schedule
from meshwright.pipeline.lower import LowerOptions

POISON = "poison"


class Wrong(Exception):
    """The step would hang, or its gradients would differ from a single device's."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Wrong(what)


class Rank:
    """One rank's memory."""

    def __init__(self, table: Schedule, number: int) -> None:
        self.row = [list(action.parts()) for action in table.actions[number]]
        self.at, self.passed = 0, set()
        self.slots: dict[tuple[str, int], object] = {}
        self.where: dict[tuple[str, int, int], tuple[str, int]] = {}
        """Slot of each received value, by kind, stage and micro-batch."""
        self.values: dict[tuple[str, int, int], object] = {}
        """Values computed on this rank."""
        self.summed: dict[int, list[int]] = defaultdict(list)
        self.gathered: set[int] = set()
        self.reduced: list[int] = []
        self.synced: list[int] = []

    def batch(self, table: Schedule) -> list[int]:
        """Positions posted together: this one, and the next if the two are a send and a receive of one peer."""
        here = [self.at]
        if self.at + 1 < len(self.row):
            first, second = self.row[self.at], self.row[self.at + 1]
            if len(first) == len(second) == 1 and _is_transfer(first[0]) and _is_transfer(second[0]):
                different = first[0].kind.value[:4] != second[0].kind.value[:4]
                if different and _peer(table, first[0]) == _peer(table, second[0]):
                    here.append(self.at + 1)
        return here


class Paper:
    """All ranks."""

    def __init__(self, table: Schedule, options: LowerOptions) -> None:
        self.table, self.options = table, options
        self.ranks = [Rank(table, number) for number in range(table.num_ranks)]
        self.sends: dict[tuple[int, int, str], deque] = defaultdict(deque)
        self.recvs: dict[tuple[int, int, str], deque] = defaultdict(deque)

    def run(self) -> None:
        while any(rank.at < len(rank.row) for rank in self.ranks):
            moved = [self.step(number) for number in range(len(self.ranks))]
            need(any(moved), "all ranks block forever")
        self.check_end()

    def step(self, number: int) -> bool:
        rank = self.ranks[number]
        if rank.at == len(rank.row):
            return False
        parts = rank.row[rank.at]
        if _is_transfer(parts[0]):
            batch = rank.batch(self.table)
            before = len(rank.passed)
            for position in batch:
                self.post(number, position)
            if all(("through", position) in rank.passed for position in batch):
                rank.at = batch[-1] + 1
                return True
            return len(rank.passed) > before
        if parts[0].kind.value == "SYNC_SHARED" and not self.all_sync(number):
            return False
        for part in parts:
            self.do(number, part)
        rank.at += 1
        return True

    def post(self, number: int, position: int) -> None:
        rank = self.ranks[number]
        if ("posted", position) in rank.passed:
            return
        rank.passed.add(("posted", position))
        [part] = rank.row[position]
        kind, stage, m = part.kind.value, part.stage, part.microbatch
        peer = _peer(self.table, part)
        need(peer is not None and peer != number, "a transfer to nobody")
        if kind.startswith("SEND"):
            value = rank.values.get((kind[-1], stage, m))
            need(value is not None and value != POISON, f"{part} sends nothing")
            channel = (number, peer, kind[-1])
            self.sends[channel].append((number, position, value))
        else:
            need(part.slot is not None, "no slot")
            rank.slots[kind, part.slot] = POISON  # from now on something may be written there at any time
            rank.where[kind, stage, m] = (kind, part.slot)
            channel = (peer, number, kind[-1])
            self.recvs[channel].append((number, position, part))
        while self.sends[channel] and self.recvs[channel]:
            source, sent, value = self.sends[channel].popleft()
            target, received, part = self.recvs[channel].popleft()
            self.ranks[target].slots[part.kind.value, part.slot] = value
            self.ranks[source].passed.add(("through", sent))
            self.ranks[target].passed.add(("through", received))

    def do(self, number: int, part) -> None:
        rank, kind, stage, m = self.ranks[number], part.kind.value, part.stage, part.microbatch
        if kind in "FBIW":
            if self.options.keeps_unsharded:
                need(stage in rank.gathered, "no parameters")
            self.compute(rank, kind, stage, m)
        elif kind in ("FREE_IN", "FREE_GRAD"):
            slot = rank.where.pop(("RECV_F" if kind == "FREE_IN" else "RECV_B", stage, m), None)
            need(slot is not None and slot in rank.slots, f"{part} frees nothing")
            del rank.slots[slot]
        elif kind == "FREE_OUT":
            need(rank.values.get(("F", stage, m), POISON) != POISON, f"{part} frees nothing")
            rank.values["F", stage, m] = POISON
        elif kind == "FREE_IN_GRAD":
            need(self.table.is_transfer(stage - 1), f"{part} frees what never leaves the rank")
            need(rank.values.get(("B", stage, m), POISON) != POISON, f"{part} frees nothing")
            rank.values["B", stage, m] = POISON
        elif kind == "UNSHARD":
            need(stage not in rank.gathered, "gathered twice")
            rank.gathered.add(stage)
        elif kind == "RESHARD":
            need(stage in rank.gathered, "not gathered")
            rank.gathered.remove(stage)
        elif kind == "REDUCE":
            need(len(rank.summed[stage]) == self.table.num_microbatches, "reduced before all gradients are there")
            need(stage not in rank.reduced, "reduced twice")
            rank.reduced.append(stage)
        elif kind == "SYNC_SHARED":
            rank.synced.append(stage)

    def compute(self, rank: Rank, kind: str, stage: int, m: int) -> None:
        ranks = self.table.stage_ranks
        if stage > 0:
            need(self.read(rank, "F", stage - 1, m, "RECV_F", stage) == ("F", stage - 1, m), "another input")
        if kind != "F" and stage + 1 < len(ranks):
            need(self.read(rank, "B", stage + 1, m, "RECV_B", stage) == ("B", stage + 1, m), "another gradient")
        if kind in "BI":
            need(("F", stage, m) in rank.values, "a backward before its forward")
        if kind == "W":
            need(("I", stage, m) in rank.values, "a W before its I")
        key = ("B" if kind in "BI" else kind, stage, m)
        need(key not in rank.values, "computed twice")
        rank.values[key] = key
        if kind == "I":
            rank.values["I", stage, m] = key
        if kind in "BW":
            rank.summed[stage].append(m)

    def read(self, rank: Rank, side: str, source: int, m: int, received_by: str, stage: int) -> object:
        if self.table.stage_ranks[source] == self.table.stage_ranks[stage]:
            return rank.values.get((side, source, m))
        return rank.slots.get(rank.where.get((received_by, stage, m)))

    def all_sync(self, number: int) -> bool:
        """Return True if all ranks of the next group have reached its sync; groups sync in order."""
        turn = len(self.ranks[number].synced)
        own = [group for group in self.options.shared if number in self.members(group)]
        need(turn < len(own), "a sync of no group")
        for member in self.members(own[turn]):
            rank = self.ranks[member]
            here = rank.row[rank.at][0].kind.value if rank.at < len(rank.row) else ""
            if here != "SYNC_SHARED" and own[turn] not in self.done_groups(member):
                return False
        for stage in own[turn]:
            rank = self.ranks[self.table.stage_ranks[stage]]
            need(len(rank.summed[stage]) == self.table.num_microbatches, "synced before all gradients are there")
            need(not self.options.reduces or stage in rank.reduced, "synced before it is reduced")
        return True

    def members(self, group: tuple[int, ...]) -> set[int]:
        return {self.table.stage_ranks[stage] for stage in group}

    def done_groups(self, number: int) -> list[tuple[int, ...]]:
        own = [group for group in self.options.shared if number in self.members(group)]
        return own[: len(self.ranks[number].synced)]

    def check_end(self) -> None:
        everything = list(range(self.table.num_microbatches))
        for number, rank in enumerate(self.ranks):
            need(not rank.slots, "a buffer is not freed")
            need(not rank.gathered, "parameters are not freed")
            for stage in self.table.stages_of(number):
                need(sorted(rank.summed[stage]) == everything, "a gradient is missing")
                need(not self.options.reduces or rank.reduced.count(stage) == 1, "not reduced")
            sent = [key for key, value in rank.values.items() if key[0] in "FB" and value != POISON
                    and self.table.is_transfer(key[1] - (key[0] == "B"))]  # fmt: skip
            need(not sent, "an output or the gradient of an input is not freed")
            groups = sum(number in self.members(group) for group in self.options.shared)
            need(len(rank.synced) == groups, "not synced")


def run_on_paper(table: Schedule, options: LowerOptions) -> None:
    """Run a lowered table.

    Raises:
        Wrong: it hangs or computes wrong gradients.
    """
    Paper(table, options).run()


def _is_transfer(part) -> bool:
    return part.kind.value.startswith(("SEND", "RECV"))


def _peer(table: Schedule, part) -> int | None:
    """Return the rank at the other end."""
    other = part.stage + {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[part.kind.value]
    return table.stage_ranks[other] if 0 <= other < table.num_stages else None
