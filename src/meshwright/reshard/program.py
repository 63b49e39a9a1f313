"""What one rank does in one step: which windows it packs, sends, receives, reduces and unpacks, as a value.

Worked out once for a step and a rank and kept, as values only; the executor then makes a few calls for each tensor.
Where pieces lie one after another in the order of the group's ranks, the tensor itself is sent or received into, and
nothing is packed. What a step stages is never more than `pieces.staging_elements` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Reduction
from meshwright.reshard.pieces import Piece, in_rounds, received, sent
from meshwright.reshard.steps import REDUCING, Step, StepKind
from meshwright.reshard.windows import Copy, Strides, Window, contiguous_strides, flat_range, fused, places, shifted

OUTSIDE = -1
"""In `slots`: a rank of the group that does not take part."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Partial values of one region, reduced in their order onto the result.

    Attributes:
        size: of the region.
        target: where it lies in the result.
        copies: where each copy lies; the flag says whether among what was received, or else in the rank's own tensor.
    """

    size: tuple[int, ...]
    target: Window
    copies: tuple[tuple[bool, Window], ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One collective and the copies around it. Buffers are flat, and all counts are of elements.

    Attributes:
        send: splits by the group's ranks; of an all-gather, the padded length of a part, once.
        receive: likewise; of an all-gather, for each rank of the group.
        gathers: it is an all-gather, whose parts lie in the buffer by the group's ranks, this rank's before it starts.
        send_from: where in the rank's own tensor what is sent begins, if nothing is packed.
        receive_at: where in the result what is received begins, if nothing is unpacked.
        pack: own tensor → send buffer (of an all-gather: the only buffer).
        unpack: receive buffer → result.
        own: own tensor → result.
        folds: receive buffer and own tensor → result.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    gathers: bool = False
    send_from: int | None = None
    receive_at: int | None = None
    pack: tuple[Copy, ...] = ()
    unpack: tuple[Copy, ...] = ()
    own: tuple[Copy, ...] = ()
    folds: tuple[Fold, ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """A way to reduce: so many copies that lie next to each other, then divided."""

    reduction: Reduction
    num_copies: int
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class Program:
    """A step as one rank runs it.

    Attributes:
        before: shape of the rank's tensor.
        after: likewise.
        changes: False if the tensor stays as it is.
        rounds: in order.
        levels: of a step that reduces, outermost first.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    changes: bool
    rounds: tuple[Round, ...]
    levels: tuple[Level, ...] = ()


@lru_cache(maxsize=4096)
def compile_step(step: Step, rank: int, slots: tuple[int, ...], strides: Strides) -> Program:
    """The step as `rank` runs it.

    Args:
        step: what to do.
        rank: within the mesh.
        slots: for each rank of the process group its rank within the mesh, or `OUTSIDE`.
        strides: of the rank's tensor before the step.
    """
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
        if step.kind is StepKind.ALL_GATHER and not self._gathers():
            self.rounds *= 2  # an exchange packs a part once for each receiver: in halves it holds no more than planned

    def program(self) -> Program:
        rounds = self.rounds
        levels = _levels(self.step) if self.reduces else ()
        incoming = [in_rounds(piece, rounds) for piece in received(self.step, self.rank) if piece.numel()]
        if len(self.slots) == 1 and not levels:
            own = self._whole_own([parts[0] for parts in incoming if parts[0]])
            if own:
                return Program(self.before, self.after, False, ())
        outgoing = [in_rounds(piece, rounds) for piece in sent(self.step, self.rank) if piece.numel()]
        make = self._gather if self._gathers() else self._exchange
        found = []
        for at in range(rounds):
            out = [part for parts in outgoing if (part := parts[at])]
            into = [part for parts in incoming if (part := parts[at])]
            found.append(make(out, into))
        return Program(self.before, self.after, True, tuple(found), levels)

    def _whole_own(self, pieces: Sequence[Piece]) -> bool:
        """All that the rank has is all that it is to have."""
        return self.before == self.after and all(len(r) <= 1 for p in pieces for r in p.runs)

    def _gathers(self) -> bool:
        """An all-gather does it: everybody's whole part goes to everybody in the group."""
        step = self.step
        if OUTSIDE in self.slots or len(self.slots) == 1:
            return False
        if step.kind is StepKind.ALL_GATHER:
            return True
        if len(self.slots) == 2:
            return False  # an exchange sends the tensor as it lies, and receives one copy instead of two
        reduced = [axis for axis in step.axes if step.src.partial[axis]]
        copies = math.prod(step.src.axis_sizes[axis] for axis in reduced)
        return step.kind is StepKind.ALL_REDUCE and step.src.splits == step.dst.splits and copies == len(self.slots)

    def _gather(self, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> Round:
        length = max((piece.numel() for piece in incoming), default=0)
        at = {piece.sender: self.slot_of[piece.sender] * length for piece in incoming}
        receive = (length,) * len(self.slots)
        own = next((piece for piece in incoming if piece.sender == self.rank), None)
        pack = self._packs([own], [at[self.rank]]) if own else ()
        if self.reduces:
            return Round((length,), receive, gathers=True, pack=pack, folds=self._folds(incoming, at))
        if self.rounds == 1 and self._lie(incoming, at):
            return Round((length,), receive, gathers=True, receive_at=0, pack=pack)
        return Round((length,), receive, gathers=True, pack=pack, unpack=self._unpacks(incoming, at))

    def _lie(self, incoming: Sequence[Piece], at: dict[int, int]) -> bool:
        """Where each part lies in the buffer is where it belongs in the result."""
        whole = math.prod(self.after)
        ranges = [flat_range(piece, self.result_strides, of_source=False) for piece in incoming]
        wanted = [(at[piece.sender], piece.numel()) for piece in incoming]
        length = max((piece.numel() for piece in incoming), default=0)
        return ranges == wanted and length * len(self.slots) == whole

    def _exchange(self, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> Round:
        out = sorted((p for p in outgoing if p.receiver != self.rank), key=lambda p: self.slot_of[p.receiver])
        into = sorted((p for p in incoming if p.sender != self.rank), key=lambda p: self.slot_of[p.sender])
        own = [p for p in incoming if p.sender == self.rank]
        best = min((self._way(out, into, own, with_own=False), self._way(out, into, own, with_own=True)),
                   key=lambda way: way.cost)  # fmt: skip
        return best.round(self)

    def _way(self, out: list[Piece], into: list[Piece], own: list[Piece], *, with_own: bool) -> _Way:
        """One way to exchange: with the rank's own piece among what is sent and received, or apart."""
        apart = sum(p.numel() for p in out) + sum(p.numel() for p in into)
        own_elements = sum(p.numel() for p in own)
        if with_own:
            out = sorted([*out, *own], key=lambda p: self.slot_of[p.receiver])
            into = sorted([*into, *own], key=lambda p: self.slot_of[p.sender])
        send_from = self._range(out, of_source=True) if self.is_dense else None
        receive_at = None if self.reduces else self._range(into, of_source=False)
        packed = 0 if send_from is not None else sum(p.numel() for p in out)
        unpacked = 0 if receive_at is not None else sum(p.numel() for p in into)
        fits = not with_own or (len(self.slots) > 1 and packed + unpacked <= apart)
        cost = packed + unpacked + own_elements * (not with_own and not self.reduces)
        return _Way(cost if fits else math.inf, out, into, [] if with_own else own, send_from, receive_at)

    def _range(self, pieces: Sequence[Piece], *, of_source: bool) -> int | None:
        """Where the pieces begin, if they lie one after another without a gap."""
        if self.rounds > 1 or not pieces:
            return None
        start = end = None
        for piece in pieces:
            found = flat_range(piece, self.strides if of_source else self.result_strides, of_source=of_source)
            if found is None or (end is not None and found[0] != end):
                return None
            start = found[0] if start is None else start
            end = found[0] + found[1]
        return start

    def _packs(self, pieces: Sequence[Piece], offsets: Sequence[int]) -> tuple[Copy, ...]:
        return fused([
            Copy(place.size, place.source, shifted(place.packed, offset))
            for piece, offset in zip(pieces, offsets, strict=True)
            for place in places(piece, self.strides, self.strides, by_source=True, by_target=False)
        ])  # fmt: skip

    def _unpacks(self, pieces: Sequence[Piece], at: dict[int, int]) -> tuple[Copy, ...]:
        strides = self.result_strides
        return fused([
            Copy(place.size, shifted(place.packed, at[piece.sender]), place.target)
            for piece in pieces
            for place in places(piece, strides, strides, by_source=False, by_target=True)
        ])  # fmt: skip

    def _copies(self, pieces: Sequence[Piece]) -> tuple[Copy, ...]:
        return fused([
            Copy(place.size, place.source, place.target)
            for piece in pieces
            for place in places(piece, self.strides, self.result_strides, by_source=True, by_target=True)
        ])  # fmt: skip

    def _folds(self, pieces: Sequence[Piece], at: dict[int, int]) -> tuple[Fold, ...]:
        """One for each window of each region; senders that are not in `at` are the rank itself, unpacked."""
        regions: dict[tuple[object, ...], list[Piece]] = {}
        for piece in sorted(pieces, key=lambda piece: piece.copy):
            key = tuple(tuple((run.target, run.length) for run in runs) for runs in piece.runs)
            regions.setdefault(_joined_runs(key), []).append(piece)
        return tuple(fold for copies in regions.values() for fold in self._region(copies, at))

    def _region(self, copies: list[Piece], at: dict[int, int]) -> list[Fold]:
        own = next((piece for piece in copies if piece.sender not in at), None)
        lead = own or copies[0]
        strides = self.strides if own else self.result_strides
        found = []
        for place in places(lead, strides, self.result_strides, by_source=own is not None, by_target=True):
            where = tuple(
                (True, shifted(place.packed, at[piece.sender])) if piece.sender in at else (False, place.source)
                for piece in copies
            )
            found.append(Fold(place.size, place.target, where))
        return found


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to exchange, and the elements that are copied on it."""

    cost: float
    out: list[Piece]
    into: list[Piece]
    own: list[Piece]
    send_from: int | None
    receive_at: int | None

    def round(self, compiler: _Compiler) -> Round:
        """The collective and its copies."""
        send, receive = [0] * len(compiler.slots), [0] * len(compiler.slots)
        out_at, into_at = [], {}
        for piece in self.out:
            out_at.append(sum(send))
            send[compiler.slot_of[piece.receiver]] += piece.numel()
        for piece in self.into:
            into_at[piece.sender] = sum(receive)
            receive[compiler.slot_of[piece.sender]] += piece.numel()
        packs = self.send_from is None
        unpacks = self.receive_at is None and not compiler.reduces
        return Round(
            tuple(send),
            tuple(receive),
            send_from=self.send_from,
            receive_at=self.receive_at,
            pack=compiler._packs(self.out, out_at) if packs else (),
            unpack=compiler._unpacks(self.into, into_at) if unpacks else (),
            own=() if compiler.reduces else compiler._copies(self.own),
            folds=compiler._folds([*self.into, *self.own], into_at) if compiler.reduces else (),
        )


def _joined_runs(key: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[object, ...]:
    """Target indices alone: copies of a region may be cut into runs at different places."""
    joined = []
    for runs in key:
        found: list[tuple[int, int]] = []
        for start, length in runs:
            if found and sum(found[-1]) == start:
                found[-1] = (found[-1][0], found[-1][1] + length)
            else:
                found.append((start, length))
        joined.append(tuple(found))
    return tuple(joined)


def _levels(step: Step) -> tuple[Level, ...]:
    """How the copies of an element are reduced: neighbouring axes that do the same become one level."""
    levels: list[Level] = []
    for axis in step.axes:
        reduction = step.src.partial[axis]
        if reduction is None or step.dst.partial[axis]:
            continue
        size = step.src.axis_sizes[axis]
        divisor = size if reduction is Reduction.AVG else 1
        kind = Reduction.SUM if reduction is Reduction.AVG else reduction
        if levels and levels[-1].reduction is kind:
            levels[-1] = Level(kind, levels[-1].num_copies * size, levels[-1].divisor * divisor)
        else:
            levels.append(Level(kind, size, divisor))
    if not levels:
        raise LayoutError(
            f"the step {step.kind} over axes {step.axes} has nothing to reduce",
            rule="a step that reduces has an axis with partial values before it and none after it",
            fix="plan anew",
        )
    return tuple(levels)
