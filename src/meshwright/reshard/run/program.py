"""Immutable program that one rank runs for a step: the windows to pack, send, receive, reduce and unpack."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.mesh.reduction import Reduction
from meshwright.reshard.run.strided_windows import StridedCopy, Window

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
