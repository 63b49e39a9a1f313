"""Plan the CUDA graphs of a rank's step: which graph each layer and micro-batch replays, and what memory they share.

A plan is a value: it is made, verified and drawn without a GPU, and ranks compare its fingerprint before they capture
anything.

[Note: slots] A micro-batch occupies a slot of its chunk from its first computation to its last, deferred weight
gradients included. In mode `slot` each slot has its own graphs of all layers of the chunk, and its own memory pool, so
the number of graphs depends on the micro-batches in flight and not on their total number. Slots can't share a pool:
when a graph is captured, memory that another slot's graphs had freed would be given to tensors that must survive that
other slot's next replay.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from meshwright.capture.lifetimes import (
    GRADIENTS,
    Event,
    Interval,
    Lifetime,
    Lifetimes,
    Role,
    color_groups,
    color_intervals,
    overlaps_itself,
    row_events,
)  # fmt: skip
from meshwright.capture.signature import LayerSignature, TensorSignature, chunks_of
from meshwright.errors import InputError
from meshwright.pipeline.actions import COMPUTE, ActionKind
from meshwright.pipeline.schedule_table import Schedule

K = ActionKind
FORMAT = "meshwright capture plan 2"


class CaptureMode(StrEnum):
    """How many graphs a layer has."""

    SLOT = "slot"
    PER_MICROBATCH = "per_microbatch"
    """Those of each micro-batch, all in one memory pool, where temporary memory is shared."""


@dataclass(frozen=True)
class StaticTensor:
    """A tensor with a fixed address that graphs read or write, by what owns it.

    In mode `slot` it serves all micro-batches of the slot, else one micro-batch.
    """

    role: Role
    stage: int
    layer: int
    number: int
    """0 for the layer's input and output; else the number of an argument, or the position of a further result."""
    instance: int
    """Slot or micro-batch; always the micro-batch of copies for other stages, which no graph writes."""
    buffer: int


@dataclass(frozen=True)
class Graph:
    """A graph to capture: one computation of a layer."""

    kind: ActionKind
    stage: int
    layer: int
    instance: int
    pool: int
    """Memory pool; graphs of a pool never run while another graph's saved tensors lie in what they have freed."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}.{self.layer} of {self.instance}"


@dataclass(frozen=True)
class CapturePlan:
    """Graphs and static memory of a rank's step. Made by `plan_capture`, checked by `verify_capture`."""

    mode: CaptureMode
    rank: int
    num_microbatches: int
    events: tuple[Event, ...]
    chunks: tuple[tuple[int, tuple[LayerSignature, ...]], ...]
    slots: tuple[tuple[int, tuple[int, ...]], ...]
    """Slot of each micro-batch, by stage."""
    buffers: tuple[TensorSignature, ...]
    tensors: tuple[StaticTensor, ...]
    graphs: tuple[Graph, ...]
    """In the order in which they are captured: that of the table."""

    def num_slots(self, stage: int) -> int:
        return max(dict(self.slots)[stage], default=-1) + 1

    @property
    def num_pools(self) -> int:
        return len({graph.pool for graph in self.graphs})

    @property
    def buffer_bytes(self) -> int:
        return sum(signature.num_bytes for signature in self.buffers)

    @property
    def peak_bytes(self) -> int:
        """Bytes of static memory and of all pools."""
        return self.buffer_bytes + sum(self.pool_bytes().values())

    def pool_bytes(self) -> dict[int, int]:
        """Return the bytes of each pool: what forwards leave to backwards at most, and the largest temporary memory."""
        chunks = dict(self.chunks)
        if self.mode is CaptureMode.SLOT:
            pools = {graph.pool: chunks[graph.stage] for graph in self.graphs}
            return {
                pool: sum(one.saved_bytes for one in layers) + max(one.temporary_bytes for one in layers)
                for pool, layers in pools.items()
            }
        return {0: self._shared_pool_bytes()} if self.graphs else {}

    def _shared_pool_bytes(self) -> int:
        chunks, peak, saved = dict(self.chunks), 0, 0
        last = {(e.stage, e.microbatch, e.layer): i for i, e in enumerate(self.events) if e.kind in COMPUTE}
        for index, event in enumerate(self.events):
            if event.layer is None:
                continue
            layer = chunks[event.stage][event.layer]
            saved += layer.saved_bytes if event.kind is K.FORWARD else 0
            peak = max(peak, saved + layer.temporary_bytes)
            saved -= layer.saved_bytes if last[event.stage, event.microbatch, event.layer] == index else 0
        return peak

    def fingerprint(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, default=lambda value: value.value)


def plan_capture(
    schedule: Schedule,
    *,
    rank: int = 0,
    layers_per_chunk: int | Sequence[int],
    signatures: LayerSignature | Sequence[Sequence[LayerSignature]],
    reuse_io: bool = True,
    reuse_grad_outputs: bool = True,
    mode: str = "slot",
) -> CapturePlan:
    """Plan the CUDA graphs of a rank's captured layers.

    Args:
        layers_per_chunk: number of captured layers (or regions of layers) of each stage on the rank, or of every one.
        signatures: signature of all of these layers, or those of each stage's layers.
        reuse_io: let inputs and outputs that are not alive at the same time share memory.
        reuse_grad_outputs: let gradients share memory with what is not alive at the same time.
        mode: `slot` or `per_microbatch`; see `CaptureMode`.

    Raises:
        ScheduleError: the table is not lowered, or has no such rank.
        InputError: the numbers of layers don't agree, or the mode is unknown.
    """
    if mode not in set(CaptureMode):
        rule = f"the modes are {', '.join(CaptureMode)}"
        raise InputError(f"{mode} is not a mode", where="plan_capture, mode", rule=rule, fix=CaptureMode.SLOT)
    chunks = chunks_of(schedule.stages_of(rank) if 0 <= rank < schedule.num_ranks else (), layers_per_chunk, signatures)
    events = row_events(schedule, rank, {stage: len(layers) for stage, layers in chunks.items()})
    lifetimes = Lifetimes(schedule, events, chunks)
    times, microbatches = lifetimes.microbatches(), range(schedule.num_microbatches)
    # Each micro-batch gets a slot of its chunk, as few as possible.
    slots = {stage: tuple(color_intervals([times[stage, m] for m in microbatches])) for stage in chunks}
    by_slot = mode == CaptureMode.SLOT
    instances = slots if by_slot else dict.fromkeys(chunks, tuple(microbatches))
    buffers, tensors = _place(
        _owned(lifetimes.tensors(), instances), reuse_io=reuse_io, reuse_grad_outputs=reuse_grad_outputs
    )
    return CapturePlan(
        CaptureMode(mode),
        rank,
        schedule.num_microbatches,
        events,
        tuple(chunks.items()),
        tuple(slots.items()),
        buffers,
        tensors,
        tuple(_graphs(events, instances, by_slot=by_slot)),
    )


Instances = dict[int, tuple[int, ...]]
"""Instance of the graphs that each micro-batch replays, by stage."""
Owner = tuple[Role, int, int, int, int]
"""Role, stage, layer, index and instance of a static tensor."""


def _owned(tensors: Iterable[Lifetime], instances: Instances) -> dict[Owner, list[Lifetime]]:
    """Group the lifetimes by the static tensor that serves them.

    What leaves the chunk is copied first if, in any slot, the next micro-batch may overwrite it too early.
    """
    groups: dict[Owner, list[Lifetime]] = defaultdict(list)
    for one in tensors:
        groups[one.role, one.stage, one.layer, one.number, instances[one.stage][one.microbatch]].append(one)
    copied = {owner[:4] for owner, group in groups.items() if overlaps_itself([_whole(one) for one in group])}
    found: dict[Owner, list[Lifetime]] = {}
    for owner, group in groups.items():
        role, stage, layer, index, _ = owner
        if owner[:4] not in copied:
            found[owner] = [_with_interval(one, one.role, _whole(one)) for one in group]
            continue
        found[owner] = group
        copy = Role.HANDED_OVER if role is Role.OUTPUT else Role.HANDED_BACK
        for one in group:
            assert one.leaves is not None, "a tensor that stays in its chunk is dead before its slot is used again"
            found[copy, stage, layer, index, one.microbatch] = [_with_interval(one, copy, one.leaves)]
    return found


def _whole(one: Lifetime) -> Interval:
    return (one.interval[0], max(one.interval[1], one.leaves[1] if one.leaves else 0))


def _with_interval(one: Lifetime, role: Role, interval: Interval) -> Lifetime:
    return Lifetime(role, one.stage, one.layer, one.microbatch, one.signature, interval, one.number)


def _place(
    owned: dict[Owner, list[Lifetime]], *, reuse_io: bool, reuse_grad_outputs: bool
) -> tuple[tuple[TensorSignature, ...], tuple[StaticTensor, ...]]:
    """Give each static tensor memory, shared between those of one signature that are never alive together."""
    by_signature: dict[TensorSignature, list[Owner]] = defaultdict(list)
    buffers: list[TensorSignature] = []
    tensors: list[StaticTensor] = []
    for owner, group in owned.items():
        if reuse_grad_outputs if owner[0] in GRADIENTS else reuse_io:
            by_signature[group[0].signature].append(owner)
        else:
            tensors.append(StaticTensor(*owner, buffer=len(buffers)))
            buffers.append(group[0].signature)
    for signature, owners in by_signature.items():
        colors = color_groups([[one.interval for one in owned[owner]] for owner in owners])
        tensors += [StaticTensor(*owner, buffer=len(buffers) + c) for owner, c in zip(owners, colors, strict=True)]
        buffers += [signature] * (max(colors) + 1)
    return tuple(buffers), tuple(tensors)


def _graphs(events: Sequence[Event], instances: Instances, *, by_slot: bool) -> Iterator[Graph]:
    """Yield the graphs in the order in which the table first runs them."""
    pools: dict[tuple[int, int], int] = {}
    seen: set[tuple[ActionKind, int, int, int]] = set()
    for event in events:
        if event.layer is None or event.kind not in COMPUTE:
            continue
        instance = instances[event.stage][event.microbatch]
        key = (event.kind, event.stage, event.layer, instance)
        if key not in seen:
            seen.add(key)
            pool = pools.setdefault((event.stage, instance), len(pools)) if by_slot else 0
            yield Graph(*key, pool=pool)
