"""What one rank does in one step: which windows it packs, sends, receives, reduces and unpacks, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.mesh.reduction import Reduction
from meshwright.reshard.run.strided_windows import StridedCopy, Window

OUTSIDE = -1
"""In `slots`: a rank of the group that does not take part."""


@dataclass(frozen=True, slots=True)
class RegionReduction:
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
class ExchangeRound:
    """One collective and the copies around it. Buffers are flat, and all counts are of elements.

    Attributes:
        send: splits by the group's ranks; of an all-gather, the padded length of a part, once.
        receive: likewise; of an all-gather, for each rank of the group.
        num_sent: in all.
        num_received: likewise.
        gathers: it is an all-gather, whose parts lie in the buffer by the group's ranks; its own is packed there.
        permutes: no rank of the group has anything for, or from, more than one.
        send_from: where in the rank's own tensor what is sent begins, if nothing is packed.
        receive_at: where in the result what is received begins, if nothing is unpacked.
        pack: own tensor → send buffer (of an all-gather: the only buffer).
        unpack: receive buffer → result.
        own: own tensor → result.
        folds: receive buffer and own tensor → result.
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
        """What is packed, and then what is received, beside the tensors before and after."""
        if self.gathers:
            return self.num_received if self.receive_at is None else 0
        return self.num_sent * (self.send_from is None) + self.num_received * (self.receive_at is None)


@dataclass(frozen=True, slots=True)
class ReductionLevel:
    """A way to reduce: so many copies that lie next to each other, then divided."""

    reduction: Reduction
    num_copies: int
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A step as one rank runs it.

    Attributes:
        before: shape of the rank's tensor.
        after: likewise.
        changes: False if the tensor stays as it is.
        rounds: in order.
        staging_elements: packed and received ones of the largest round, in one buffer for all rounds.
        levels: of a step that reduces, outermost first.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    changes: bool
    rounds: tuple[ExchangeRound, ...]
    staging_elements: int = 0
    levels: tuple[ReductionLevel, ...] = ()
