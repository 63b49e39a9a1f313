"""Actions of a pipeline schedule: kinds, text form, and the two ends of a transfer.

`2F3` means stage 2, kind F, micro-batch 3. Each end of a transfer is named after its own stage: `2SEND_F3` matches
`3RECV_F3`, and `3SEND_B3` matches `2RECV_B3`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ActionKind(Enum):
    """Kind of an action; the value is its name in a table."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input and weights."""
    BACKWARD_INPUT = "I"
    """Gradient of the input only; W computes the weight gradients."""
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    FREE_INPUT = "FREE_IN"
    FREE_OUTPUT = "FREE_OUT"
    FREE_GRADIENT = "FREE_GRAD"
    FREE_INPUT_GRADIENT = "FREE_IN_GRAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"
    SYNC_SHARED = "SYNC_SHARED"

    # Enum.__hash__ is implemented in Python, and kinds are hashed in every hot loop over a table.
    __hash__ = object.__hash__


K = ActionKind
BACKWARDS = frozenset({K.BACKWARD, K.BACKWARD_INPUT})
"""Kinds that compute the gradient of a stage's input."""
COMPUTE = frozenset({K.FORWARD, K.BACKWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT})
SENDS = frozenset({K.SEND_FORWARD, K.SEND_BACKWARD})
RECVS = frozenset({K.RECV_FORWARD, K.RECV_BACKWARD})
FREES = frozenset({K.FREE_INPUT, K.FREE_OUTPUT, K.FREE_GRADIENT, K.FREE_INPUT_GRADIENT})
STAGE_LEVEL = frozenset({K.UNSHARD, K.RESHARD, K.REDUCE, K.SYNC_SHARED})
"""Kinds that apply to a whole stage and have no micro-batch."""

PEERS = {
    K.SEND_FORWARD: (K.RECV_FORWARD, 1),
    K.RECV_FORWARD: (K.SEND_FORWARD, -1),
    K.SEND_BACKWARD: (K.RECV_BACKWARD, -1),
    K.RECV_BACKWARD: (K.SEND_BACKWARD, 1),
}
"""Kind of the other end of a transfer, and its stage offset."""

NO_MICROBATCH = -1

DESCRIPTIONS = {
    K.FORWARD: "forward",
    K.BACKWARD: "backward",
    K.BACKWARD_INPUT: "gradient of the input",
    K.BACKWARD_WEIGHT: "gradient of the weights",
    K.SEND_FORWARD: "sending the output",
    K.RECV_FORWARD: "receiving the input",
    K.SEND_BACKWARD: "sending the gradient of the input",
    K.RECV_BACKWARD: "receiving the gradient of the output",
    K.FREE_INPUT: "freeing the input",
    K.FREE_OUTPUT: "waiting for the send of the output",
    K.FREE_GRADIENT: "freeing the gradient of the output",
    K.FREE_INPUT_GRADIENT: "waiting for the send of the gradient of the input",
    K.UNSHARD: "unsharding the parameters",
    K.RESHARD: "resharding the parameters",
    K.REDUCE: "reducing the gradients",
    K.SYNC_SHARED: "summing the gradients of shared parameters",
}


class Action(NamedTuple):
    """Single action on one stage."""

    kind: ActionKind
    stage: int
    microbatch: int = NO_MICROBATCH
    slot: int | None = None
    """Index of the receive buffer, per direction; None unless this is a lowered receive."""

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        slot = "" if self.slot is None else f"@{self.slot}"
        return f"{self.stage}{self.kind.value}{microbatch}{slot}"

    def describe(self) -> str:
        """Return a readable description, such as `2F3: forward of micro-batch 3 on stage 2`."""
        microbatch = "" if self.microbatch == NO_MICROBATCH else f" of micro-batch {self.microbatch}"
        return f"{self}: {DESCRIPTIONS[self.kind]}{microbatch} on stage {self.stage}"

    def parts(self) -> tuple[Action, ...]:
        return (self,)

    def peer(self) -> Action:
        kind, step = PEERS[self.kind]
        return Action(kind, self.stage + step, self.microbatch)


@dataclass(frozen=True)
class Overlap:
    """Two independent computations that take turns, so that each hides the other's all-to-alls (DualPipe)."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"

    def parts(self) -> tuple[Action, ...]:
        return (self.first, self.second)
