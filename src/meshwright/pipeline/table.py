"""A pipeline schedule as a value: what each rank does, in order.

Generators (`generate/`) emit compute only; `lower` adds communication, frees, sharding and buffer slots; `verify`,
`simulate` and `draw` take either; `execute` runs a lowered one and decides nothing. One stage on one rank is the plain
gradient-accumulation loop `F0 B0 F1 B1 …`, so there is one path for every step and what is proved is what runs.

An action reads `2F3`: stage, kind, micro-batch. A transfer is named by the stage at its own end: `2SEND_F3` is answered
by `3RECV_F3`, and `3SEND_B3` by `2RECV_B3`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property


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


@dataclass(frozen=True)
class Schedule:
    """Per rank, its actions in order."""

    kind: str
    """Its name: one that `generate` knows, or what a file gave."""
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    """The rank that each stage is on."""
    actions: tuple[tuple[Action | Overlap, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_chunks(self) -> int:
        """The most stages that one rank has."""
        return max(self.stage_ranks.count(rank) for rank in range(self.num_ranks))

    @cached_property
    def is_lowered(self) -> bool:
        """Whether `lower` was here: there is more than compute."""
        return any(action.kind not in COMPUTE for _, _, action in self.positions())

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some stage's backward comes in two parts."""
        return any(action.kind is K.BACKWARD_WEIGHT for _, _, action in self.positions())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in the model's order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def is_transfer(self, stage: int) -> bool:
        """Whether what `stage` hands to the next one goes to another rank."""
        return 0 <= stage < self.num_stages - 1 and self.stage_ranks[stage] != self.stage_ranks[stage + 1]

    def positions(self) -> Iterator[tuple[int, int, Action]]:
        """Every action with its rank and its position there; the two of an overlap share one."""
        for rank, actions in enumerate(self.actions):
            for position, action in enumerate(actions):
                for part in action.parts():
                    yield rank, position, part

    def compute_only(self) -> Schedule:
        """The table as a generator would give it."""
        return replace(
            self,
            actions=tuple(
                tuple(action for action in actions if action.parts()[0].kind in COMPUTE) for actions in self.actions
            ),
        )

    def fingerprint(self) -> str:
        """A hash of everything, for ranks to compare."""
        rows = "\n".join(" ".join(map(str, actions)) for actions in self.actions)
        text = f"{self.kind} {self.num_microbatches} {self.stage_ranks}\n{rows}"
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """The whole table; `from_json` is its inverse."""
        from meshwright.pipeline import text

        return text.to_json(self)

    @staticmethod
    def from_json(source: str, *, where: str = "JSON") -> Schedule:
        """The table that `to_json` wrote.

        Raises:
            ScheduleError: it is not one, and where.
        """
        from meshwright.pipeline import text

        return text.from_json(source, where=where)

    def to_csv(self) -> str:
        """The compute actions, a line a rank, a cell an action."""
        from meshwright.pipeline import text

        return text.to_csv(self)

    @staticmethod
    def from_csv(source: str, *, where: str = "CSV", kind: str = "csv") -> Schedule:
        """A table of compute actions that a person wrote.

        Raises:
            ScheduleError: a cell is not an action (with its line and column), a stage is on two ranks or on none.
        """
        from meshwright.pipeline import text

        return text.from_csv(source, where=where, kind=kind)


def one_stage(num_microbatches: int) -> Schedule:
    """The schedule of one rank that holds the whole model: forward and backward of each micro-batch in turn."""
    kinds = (K.FORWARD, K.BACKWARD)
    actions = tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in kinds)
    return Schedule("one stage", num_microbatches, (0,), (actions,))
