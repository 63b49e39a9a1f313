"""Parts of a rank's time in a step, and the bytes that it really sent, by purpose and link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from meshwright.pipeline.timeline import Reading, TimedOperation
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.traffic import LinkBytes, Message, Purpose, by_link, messages, predict_traffic

ZERO = Reading(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StepParts:
    """A rank's time of a step, in seconds."""

    compute: float
    """Forward and backward: on the CPU, time on a core; on a GPU, all of it, with the communication inside blocks."""
    data: float
    """Waiting for batches, or preparing them."""
    communication: float
    """Waiting for collectives and messages, which no computation hides."""
    bubble: float
    """Waiting for other stages that the pipeline schedule itself implies."""
    optimizer: float
    """Gradient norm, clipping and update."""
    core: float
    """Ready to run, but waiting for a core of this machine."""
    other: float

    def total(self) -> float:
        """Return the time of the step."""
        return sum((getattr(self, field.name) for field in fields(self)), 0.0)


@dataclass(frozen=True)
class RawParts:
    """Times of a step before waiting is divided into bubble and communication."""

    total: float
    compute: float
    data: float
    blocked: float
    """Blocked within computations, in gradient reductions and in messages that were sent."""
    stages: float
    """Blocked until other stages' tensors had arrived, or until all ranks had ended the step."""
    optimizer: float
    core: float

    def split(self, idle: float) -> StepParts:
        """Divide the waiting for other stages.

        Args:
            idle: time in which the schedule has nothing to do on this rank, with the measured times of computations.
        """
        bubble = min(self.stages, idle)
        known = (self.compute, self.data, self.blocked + self.stages - bubble, bubble, self.optimizer, self.core)
        return StepParts(*known, other=max(0.0, self.total - sum(known)))


def raw_parts(
    timed: Sequence[TimedOperation], data: Reading, *, begin: Reading, reduce: Reading, reduced: Reading, end: Reading
) -> RawParts:
    """Return the times of a step.

    Args:
        timed: operations of the pipeline executor.
        data: time within the functions that return batches, which forwards call.
        begin: at the beginning of the step.
        reduce: before the sum over all ranks that ends the backwards.
        reduced: after it.
        end: at the end of the step.
    """
    ran = timed[-1].end if timed else begin
    norm, update = reduce - ran, end - reduced
    inside = [one.end - one.start for one in timed if one.is_compute]
    # In an overlapped pair, a thread is blocked while the other one computes.
    paired = sum((one.end - one.start).blocked for one in timed if one.turns is not None)
    outside = [one.end - one.start for one in timed if not one.is_compute]
    waits = [one.start - one.before for one in timed]
    whole = end - begin
    compute = sum(time.cpu for time in inside) + paired - data.cpu
    return RawParts(
        total=whole.wall,
        compute=max(0.0, compute),
        data=data.wall - data.queued,
        blocked=max(0.0, sum(time.blocked for time in (*inside, *outside)) - paired - data.blocked),
        stages=sum(time.blocked for time in waits) + (reduced - reduce).blocked,
        optimizer=norm.cpu + norm.blocked + update.cpu + update.blocked,
        core=whole.queued,
    )


ALL_TO_ALL, EXCHANGE = "all_to_all", "exchange"
TO_SOME = frozenset({ALL_TO_ALL, EXCHANGE})
"""Operations that may send to some ranks of their group only, and different amounts to each."""
Sent = tuple[str, tuple[int, ...]]
"""Operation, and global ranks of its group."""
RING = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
OPERATIONS: Mapping[str, frozenset[str]] = {
    Purpose.WEIGHTS: frozenset({"all_gather"}),
    Purpose.GRADIENTS: frozenset({"reduce_scatter"}),
    Purpose.REPLICAS: frozenset({"all_reduce"}),
    Purpose.BUFFERS: frozenset({"all_reduce"}),
    Purpose.SHARED: frozenset({"all_reduce"}),
    Purpose.STAGES: frozenset({"send"}),
    Purpose.CONTEXT: frozenset({ALL_TO_ALL}),
    Purpose.OPTIMIZER: frozenset({EXCHANGE}),
    Purpose.EXPERTS: frozenset({ALL_TO_ALL, "all_reduce"}),
}
"""Operations of each purpose; the plan's other purposes have all but sends, all-to-alls and exchanges."""
COMPRESSED = frozenset({Purpose.GRADIENTS, Purpose.WEIGHTS, Purpose.REPLICAS})
"""Purposes that codecs compress, which are counted together."""


@dataclass(frozen=True)
class CountedPurpose:
    """Bytes of one purpose, or of several that can't be told apart, in a step of one rank."""

    purposes: tuple[str, ...]
    counted: LinkBytes
    predicted: LinkBytes


def count_purposes(
    plan: RunPlan, rank: int, sent: Mapping[Sent, int], compressed: LinkBytes | None
) -> list[CountedPurpose]:
    """Assign what a rank sent in a step to purposes.

    What is counted is an operation on a group of ranks; the plan's messages say which purposes have such operations on
    that group. Purposes that can't be told apart share an entry.

    Args:
        plan: plan of the run.
        rank: the rank.
        sent: bytes by operation and ranks of the group: to each peer, or in all-to-alls and exchanges to all of them.
        compressed: bytes of compressed collectives; None without compression.

    Returns:
        Entries for all purposes that are predicted or counted, largest first. Bytes of all-to-alls and exchanges are
        split over links as if each peer got the same.
    """
    of_group: dict[tuple[int, ...], set[str]] = {}
    for message in messages(plan, rank):
        if message.peers and message.num_bytes and not (compressed is not None and message.purpose in COMPRESSED):
            of_group.setdefault(tuple(sorted({rank, *message.peers})), set()).add(message.purpose)
    joined: list[set[str]] = [{purpose} for purpose in set().union(*of_group.values())]
    counts: list[tuple[set[str], LinkBytes]] = [] if compressed is None else [(set(COMPRESSED), compressed)]
    joined += [] if compressed is None else [set(COMPRESSED)]
    for (op, ranks), num_bytes in sent.items():
        group = tuple(sorted(ranks))
        found = {purpose for purpose in _purposes(of_group, group, op) if op in OPERATIONS.get(purpose, RING)}
        if not num_bytes or (not found and compressed is not None):
            continue  # compressed collectives use the groups of exact ones
        found = found or {f"{op.replace('_', '-')}s that are not predicted"}
        peers = tuple(other for other in group if other != rank)
        each = num_bytes // len(peers) if op in TO_SOME else num_bytes
        counts.append((found, by_link(plan, rank, Message("", peers, each, in_ring=op in RING))))
        overlapping = [one for one in joined if one & found]
        joined = [one for one in joined if not one & found] + [found.union(*overlapping)]
    predicted = predict_traffic(plan, rank=rank)
    entries = [
        CountedPurpose(
            tuple(sorted(purposes)),
            sum((links for found, links in counts if found <= purposes), LinkBytes()),
            sum((predicted.of(purpose).sent for purpose in purposes), LinkBytes()),
        )
        for purposes in joined
    ]
    return sorted(entries, key=lambda one: -max(one.predicted.total(), one.counted.total()))


def _purposes(of_group: Mapping[tuple[int, ...], set[str]], group: tuple[int, ...], op: str) -> set[str]:
    """Return the purposes of messages in a group; some operations have messages to some of its ranks only."""
    if op not in TO_SOME:
        return of_group.get(group, set())
    return set().union(*(found for ranks, found in of_group.items() if set(ranks) <= set(group)))
