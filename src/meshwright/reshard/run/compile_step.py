"""Compile a step to one rank's program.

Programs are cached per step and rank, so the executor makes only a few calls per tensor. Messages that are contiguous
in group-rank order are sent from or received into the tensor itself without packing. Staging never exceeds what the
planner counts (`Staging`), except for a few elements if an all-gather has no group of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.errors import LayoutError
from meshwright.mesh.shard_intervals import Reduction
from meshwright.reshard.planner.steps import REDUCING, Step, StepKind
from meshwright.reshard.run.shard_exchange import (
    ShardMessage,
    StridedCopy,
    Strides,
    Window,
    contiguous_strides,
    flat_range,
    fuse_copies,
    message_windows,
    messages_received,
    messages_sent,
    shift_window,
    split_flat,
    split_into_rounds,
)

OUTSIDE = -1
"""Entry of `slots` for a rank in the group that does not take part."""


@dataclass(frozen=True, slots=True)
class RegionReduction:
    """Ordered reduction of a region's partial values into the result.

    Attributes:
        size: shape of the region.
        target: window of the region in the result.
        copies: window of each partial value, in the receive buffer if the flag is set, else in the local tensor.
    """

    size: tuple[int, ...]
    target: Window
    copies: tuple[tuple[bool, Window], ...]


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """Collective and its surrounding copies. Buffers are flat, and all counts are in elements.

    Attributes:
        send: send split sizes by group rank; for an all-gather, only the padded length of a shard.
        receive: receive split sizes by group rank.
        num_sent: total number of elements sent.
        num_received: total number of elements received.
        gathers: whether the collective is an all-gather, where the local shard is packed into the receive buffer.
        permutes: whether each rank of the group sends to and receives from at most one rank.
        send_from: offset of the sent range in the local tensor if no packing is needed, else None.
        receive_at: offset of the received range in the result if no unpacking is needed, else None.
        pack: copies from the local tensor to the send buffer (for an all-gather, the only buffer).
        unpack: copies from the receive buffer to the result.
        own: copies from the local tensor to the result.
        reductions: reductions from the receive buffer and the local tensor into the result.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    num_sent: int
    num_received: int
    gathers: bool = False
    permutes: bool = False
    send_from: int | None = None
    receive_at: int | None = None
    pack: tuple[StridedCopy, ...] = ()
    unpack: tuple[StridedCopy, ...] = ()
    own: tuple[StridedCopy, ...] = ()
    reductions: tuple[RegionReduction, ...] = ()

    def staging_elements(self) -> int:
        """Return the number of elements in the pack and receive buffers."""
        if self.gathers:
            return self.num_received if self.receive_at is None else 0
        return self.num_sent * (self.send_from is None) + self.num_received * (self.receive_at is None)


@dataclass(frozen=True, slots=True)
class ReductionLevel:
    """Reduction of each run of `num_copies` consecutive partial values, followed by a division."""

    reduction: Reduction
    num_copies: int
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Program of one rank for a step.

    Attributes:
        before: shape of the rank's shard before the step.
        after: shape of the rank's shard after the step.
        changes: whether the shard changes.
        rounds: the rounds in order.
        staging_elements: size of the staging buffer shared by all rounds.
        levels: reduction levels of a reducing step, outermost first.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    changes: bool
    rounds: tuple[ExchangeRound, ...]
    staging_elements: int = 0
    levels: tuple[ReductionLevel, ...] = ()


Messages = Sequence[ShardMessage]


@lru_cache(maxsize=4096)
def compile_step(step: Step, rank: int, slots: tuple[int, ...], strides: Strides) -> StepProgram:
    """Compile a step to the program that `rank` of the mesh runs, given the mesh rank (or `OUTSIDE`) of each rank in
    the process group, `slots`, and the strides of the rank's tensor before it."""
    return _Compiler(step, rank, slots, strides).program()


class _Compiler:
    def __init__(self, step: Step, rank: int, slots: tuple[int, ...], strides: Strides) -> None:
        self.step, self.rank, self.slots, self.strides = step, rank, slots, strides
        self.before, self.after = step.src.local_shape(rank), step.dst.local_shape(rank)
        self.result_strides = contiguous_strides(self.after)
        self.is_dense = all(s == c or n <= 1 for n, s, c in
                            zip(self.before, strides, contiguous_strides(self.before), strict=True))  # fmt: skip
        self.reduces = step.kind in REDUCING
        self.slot_of = {mesh_rank: slot for slot, mesh_rank in enumerate(slots) if mesh_rank != OUTSIDE}
        self.rounds = max(1, step.rounds)
        self.gathers = self._is_gather()
        if step.kind is StepKind.ALL_GATHER and not self.gathers:
            self.rounds *= 2  # an exchange packs a shard once per receiver: halve rounds to stay within planned memory

    def program(self) -> StepProgram:
        levels = _levels(self.step) if self.reduces else ()
        incoming = [message for message in messages_received(self.step, self.rank) if message.numel()]
        is_whole = self.before == self.after and all(len(runs) <= 1 for p in incoming for runs in p.runs)
        if len(self.slots) == 1 and not levels and is_whole:
            return StepProgram(self.before, self.after, False, ())
        outgoing = [message for message in messages_sent(self.step, self.rank) if message.numel()]
        largest = max((message.numel() for message in incoming), default=0)
        make = self._gather if self.gathers else self._exchange
        found = [make(out, into) for out, into in
                 zip(self._in_rounds(outgoing, largest), self._in_rounds(incoming, largest), strict=True)]  # fmt: skip
        staging = max((one.staging_elements() for one in found), default=0) if len(self.slots) > 1 else 0
        return StepProgram(self.before, self.after, True, tuple(found), staging, levels)

    def _in_rounds(self, messages: Messages, largest: int) -> list[list[ShardMessage]]:
        """Split messages into rounds: ranges of the packed shard for an all-gather, else slices of each message."""
        if self.step.kind is StepKind.ALL_GATHER and self.rounds > 1:
            size = -(-largest // self.rounds)
            ends = [(at * size, (at + 1) * size) for at in range(self.rounds)]
            return [[part for message in messages for part in split_flat(message, *end)] for end in ends]
        chunks = [split_into_rounds(message, self.rounds) for message in messages]
        return [[part for parts in chunks if (part := parts[at])] for at in range(self.rounds)]

    def _is_gather(self) -> bool:
        """Return whether the step can run as an all-gather: each rank sends its full shard to the whole group."""
        step = self.step
        if OUTSIDE in self.slots or len(self.slots) == 1:
            return False
        if step.kind is StepKind.ALL_GATHER:
            return True
        if len(self.slots) == 2:
            return False  # an exchange sends from the tensor itself and stages one copy, not two
        reduced = [axis for axis in step.axes if step.src.partial[axis]]
        copies = math.prod(step.src.axis_sizes[axis] for axis in reduced)
        return step.kind is StepKind.ALL_REDUCE and step.src.splits == step.dst.splits and copies == len(self.slots)

    def _gather(self, outgoing: Messages, incoming: Messages) -> ExchangeRound:
        filled: dict[int, int] = {}
        within = []
        for message in incoming:
            within.append(filled.get(message.sender, 0))
            filled[message.sender] = within[-1] + message.numel()
        length = max(filled.values(), default=0)
        at = [self.slot_of[message.sender] * length + offset for message, offset in zip(incoming, within, strict=True)]
        mine = [i for i, message in enumerate(incoming) if message.sender == self.rank]
        own = [incoming[i] for i in mine], [at[i] for i in mine]
        sends_full_tensor = self.is_dense and length == math.prod(self.before)
        is_in_place = self.rounds == 1 and not self.reduces and self._is_in_place(incoming, at, length)
        return ExchangeRound(
            (length,),
            (length,) * len(self.slots),
            length,
            length * len(self.slots),
            gathers=True,
            send_from=0 if sends_full_tensor else None,
            receive_at=0 if is_in_place else None,
            pack=() if sends_full_tensor else self._copies(*own, of_source=True),
            unpack=() if is_in_place or self.reduces else self._copies(incoming, at, of_target=True),
            reductions=self._reductions(incoming, at) if self.reduces else (),
        )

    def _is_in_place(self, incoming: Messages, at: Sequence[int], length: int) -> bool:
        """Return whether the gather buffer has the result's memory layout and can serve as the result."""
        ranges = [flat_range(message, self.result_strides, of_source=False) for message in incoming]
        wanted = [(start, message.numel()) for start, message in zip(at, incoming, strict=True)]
        return ranges == wanted and length * len(self.slots) == math.prod(self.after)

    def _exchange(self, outgoing: Messages, incoming: Messages) -> ExchangeRound:
        out = sorted((p for p in outgoing if p.receiver != self.rank), key=lambda p: self.slot_of[p.receiver])
        into = sorted((p for p in incoming if p.sender != self.rank), key=lambda p: self.slot_of[p.sender])
        own = [p for p in incoming if p.sender == self.rank]
        candidates = [self._candidate(out, into, own, with_own=with_own) for with_own in (False, True)]
        _, out, into, own, send_from, receive_at = min(candidates, key=lambda candidate: candidate[0])
        send, receive = [0] * len(self.slots), [0] * len(self.slots)
        out_at, into_at = [], []
        for message in out:
            out_at.append(sum(send))
            send[self.slot_of[message.receiver]] += message.numel()
        for message in into:
            into_at.append(sum(receive))
            receive[self.slot_of[message.sender]] += message.numel()
        unpacks = receive_at is None and not self.reduces
        copied, none = () if self.reduces else self._copies(own, [0] * len(own), of_source=True, of_target=True), [None]
        return ExchangeRound(
            tuple(send),
            tuple(receive),
            sum(send),
            sum(receive),
            permutes=self.step.kind is StepKind.PERMUTE,
            send_from=send_from,
            receive_at=receive_at,
            pack=self._copies(out, out_at, of_source=True) if send_from is None else (),
            unpack=self._copies(into, into_at, of_target=True) if unpacks else (),
            own=copied,
            reductions=self._reductions([*into, *own], [*into_at, *none * len(own)]) if self.reduces else (),
        )

    def _candidate(
        self, out: list[ShardMessage], into: list[ShardMessage], own: list[ShardMessage], *, with_own: bool
    ) -> tuple[float, list[ShardMessage], list[ShardMessage], list[ShardMessage], int | None, int | None]:
        """Return an exchange that either sends the rank's own message through the collective or copies it locally: the
        number of elements copied locally, the messages out, in and copied, and where they start if not packed."""
        apart = sum(p.numel() for p in out) + sum(p.numel() for p in into)
        own_elements = sum(p.numel() for p in own)
        if with_own:
            out = sorted([*out, *own], key=lambda p: self.slot_of[p.receiver])
            into = sorted([*into, *own], key=lambda p: self.slot_of[p.sender])
        send_from = self._contiguous_start(out, of_source=True) if self.is_dense else None
        receive_at = None if self.reduces else self._contiguous_start(into, of_source=False)
        packed = 0 if send_from is not None else sum(p.numel() for p in out)
        unpacked = 0 if receive_at is not None else sum(p.numel() for p in into)
        fits = not with_own or (len(self.slots) > 1 and packed + unpacked <= apart)
        cost = packed + unpacked + own_elements * (not with_own and not self.reduces)
        return cost if fits else math.inf, out, into, [] if with_own else own, send_from, receive_at

    def _contiguous_start(self, messages: Messages, *, of_source: bool) -> int | None:
        """Return the offset of the first message if the messages are contiguous, else None."""
        if self.rounds > 1 or not messages:
            return None
        start = end = None
        for message in messages:
            found = flat_range(message, self.strides if of_source else self.result_strides, of_source=of_source)
            if found is None or (end is not None and found[0] != end):
                return None
            start = found[0] if start is None else start
            end = found[0] + found[1]
        return start

    def _copies(
        self, messages: Messages, offsets: Sequence[int], *, of_source: bool = False, of_target: bool = False
    ) -> tuple[StridedCopy, ...]:
        """Return copies from the rank's tensor or to its result; the other end is the messages, packed at offsets."""
        found = []
        for message, offset in zip(messages, offsets, strict=True):
            strides = self.strides if of_source else self.result_strides
            for w in message_windows(message, strides, self.result_strides, by_source=of_source, by_target=of_target):
                packed = shift_window(w.packed, offset)
                found.append(StridedCopy(w.size, w.source if of_source else packed, w.target if of_target else packed))
        return fuse_copies(found)

    def _reductions(self, messages: Messages, offsets: Sequence[int | None]) -> tuple[RegionReduction, ...]:
        """Return one reduction per window of each region. Messages without an offset are read from the local tensor."""
        regions: dict[tuple[object, ...], list[tuple[ShardMessage, int | None]]] = {}
        for message, offset in sorted(zip(messages, offsets, strict=True), key=lambda pair: pair[0].copy):
            regions.setdefault(_target_ranges(message), []).append((message, offset))
        reductions = []
        for copies in regions.values():
            own = next((message for message, offset in copies if offset is None), None)
            lead, strides = (own, self.strides) if own else (copies[0][0], self.result_strides)
            for w in message_windows(lead, strides, self.result_strides, by_source=own is not None, by_target=True):
                places = ((False, w.source) if at is None else (True, shift_window(w.packed, at)) for _, at in copies)
                reductions.append(RegionReduction(w.size, w.target, tuple(places)))
        return tuple(reductions)


def _target_ranges(message: ShardMessage) -> tuple[object, ...]:
    """Return the merged index ranges in the receiver's tensor; different partial values may have different runs."""
    joined = []
    for runs in message.runs:
        found: list[tuple[int, int]] = []
        for run in runs:
            if found and sum(found[-1]) == run.target:
                found[-1] = (found[-1][0], found[-1][1] + run.length)
            else:
                found.append((run.target, run.length))
        joined.append(tuple(found))
    return tuple(joined)


def _levels(step: Step) -> tuple[ReductionLevel, ...]:
    """Return the reduction levels, merging adjacent axes with the same reduction."""
    levels: list[ReductionLevel] = []
    for axis in step.axes:
        reduction = step.src.partial[axis]
        if reduction is None or step.dst.partial[axis]:
            continue
        size = step.src.axis_sizes[axis]
        divisor = size if reduction is Reduction.AVG else 1
        kind = Reduction.SUM if reduction is Reduction.AVG else reduction
        if levels and levels[-1].reduction is kind:
            levels[-1] = ReductionLevel(kind, levels[-1].num_copies * size, levels[-1].divisor * divisor)
        else:
            levels.append(ReductionLevel(kind, size, divisor))
    if not levels:
        raise LayoutError(
            f"the step {step.kind} over axes {step.axes} has nothing to reduce",
            rule="a reducing step has an axis that is partial before it and not after",
            fix="plan again",
        )
    return tuple(levels)
