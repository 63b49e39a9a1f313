"""Actions of a pipeline schedule: their kinds, how they are written, and which kind is the other end of a transfer.

An action reads `2F3`: stage, kind, micro-batch. A transfer is named by the stage at its own end: `2SEND_F3` is answered
by `3RECV_F3`, and `3SEND_B3` by `2RECV_B3`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """What is done, by the name it has in a table."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's inputs and weights."""
    BACKWARD_INPUT = "I"
    """Gradients of the inputs only; the weights' follow in W."""
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    FREE_INPUT = "FREE_IN"
    FREE_OUTPUT = "FREE_OUT"
    FREE_GRADIENT = "FREE_GRAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"
    SYNC_SHARED = "SYNC_SHARED"

    # An enum hashes its name in Python code, and tables are full of sets and dicts of kinds.
    __hash__ = object.__hash__


K = ActionKind
BACKWARDS = frozenset({K.BACKWARD, K.BACKWARD_INPUT})
"""Kinds that give the gradient of a stage's inputs."""
COMPUTE = frozenset({K.FORWARD, K.BACKWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT})
SENDS = frozenset({K.SEND_FORWARD, K.SEND_BACKWARD})
RECVS = frozenset({K.RECV_FORWARD, K.RECV_BACKWARD})
FREES = frozenset({K.FREE_INPUT, K.FREE_OUTPUT, K.FREE_GRADIENT})
OF_A_STAGE = frozenset({K.UNSHARD, K.RESHARD, K.REDUCE, K.SYNC_SHARED})
"""Kinds that have no micro-batch."""

PEERS = {
    K.SEND_FORWARD: (K.RECV_FORWARD, 1),
    K.RECV_FORWARD: (K.SEND_FORWARD, -1),
    K.SEND_BACKWARD: (K.RECV_BACKWARD, -1),
    K.RECV_BACKWARD: (K.SEND_BACKWARD, 1),
}
"""Of each end of a transfer the other one's kind, and how many stages on it is."""

NO_MICROBATCH = -1

WORDS = {
    K.FORWARD: "forward",
    K.BACKWARD: "backward",
    K.BACKWARD_INPUT: "gradient of the inputs",
    K.BACKWARD_WEIGHT: "gradient of the weights",
    K.SEND_FORWARD: "sending the output",
    K.RECV_FORWARD: "receiving the input",
    K.SEND_BACKWARD: "sending the gradient of the input",
    K.RECV_BACKWARD: "receiving the gradient of the output",
    K.FREE_INPUT: "freeing the input",
    K.FREE_OUTPUT: "waiting until the output is sent",
    K.FREE_GRADIENT: "freeing the gradient of the output",
    K.UNSHARD: "gathering the parameters",
    K.RESHARD: "freeing the gathered parameters",
    K.REDUCE: "reducing the gradients",
    K.SYNC_SHARED: "adding up gradients of shared parameters",
}


@dataclass(frozen=True)
class Action:
    """One piece of work."""

    kind: ActionKind
    stage: int
    microbatch: int = NO_MICROBATCH
    slot: int | None = None
    """Of a receive: which of the rank's buffers for that direction it fills."""

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        slot = "" if self.slot is None else f"@{self.slot}"
        return f"{self.stage}{self.kind.value}{microbatch}{slot}"

    def words(self) -> str:
        """For people: `2F3: forward of micro-batch 3 on stage 2`."""
        microbatch = "" if self.microbatch == NO_MICROBATCH else f" of micro-batch {self.microbatch}"
        return f"{self}: {WORDS[self.kind]}{microbatch} on stage {self.stage}"

    def parts(self) -> tuple[Action, ...]:
        """Itself; what an `Overlap` is made of."""
        return (self,)

    def peer(self) -> Action:
        """The other end of a transfer."""
        kind, step = PEERS[self.kind]
        return Action(kind, self.stage + step, self.microbatch)


@dataclass(frozen=True)
class Overlap:
    """Two pieces of work that run together, so that one hides the other's communication (DualPipe)."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"{self.first}+{self.second}"

    def parts(self) -> tuple[Action, ...]:
        """The two, in the order they start."""
        return (self.first, self.second)
