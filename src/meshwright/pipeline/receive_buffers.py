"""Buffers for what a rank receives: allocated before the first step, at addresses that never change.

A CUDA graph needs fixed addresses, and the number of buffers is that of the table's slots: what is alive at once, not
one for every micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.errors import ScheduleError
from meshwright.pipeline.actions import RECVS, Action, ActionKind
from meshwright.pipeline.lower import num_slots
from meshwright.pipeline.schedule_table import Schedule


@dataclass(frozen=True)
class TensorSpec:
    """What goes from one stage to the next, for a micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def num_bytes(self) -> int:
        """Bytes of one."""
        return math.prod(self.shape) * self.dtype.itemsize


class Buffers:
    """A rank's slots. Both directions of an edge have the same shape."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        edges: Mapping[int, TensorSpec],
        device: torch.device,
        poison: bool = False,
    ) -> None:
        """Allocate.

        Args:
            schedule: a lowered table.
            rank: whose slots.
            edges: by stage s, what goes from s to s+1.
            device: where to allocate.
            poison: fill a slot with NaN when it is freed, to find what uses it later.
        """
        self._edges = edges
        self._poison = poison
        self._slots: dict[tuple[ActionKind, int], Tensor] = {}
        largest = dict.fromkeys(RECVS, 0)
        for action in schedule.actions[rank]:
            for part in action.parts():
                if part.kind in RECVS:
                    largest[part.kind] = max(largest[part.kind], self._spec(part).num_bytes())
        for kind, count in num_slots(schedule, rank).items():
            for slot in range(count):
                self._slots[kind, slot] = torch.empty(largest[kind], dtype=torch.uint8, device=device)
        self._addresses = {slot.untyped_storage().data_ptr() for slot in self._slots.values() if slot.numel()}

    def view(self, receive: Action) -> Tensor:
        """The tensor that a receive fills."""
        spec = self._spec(receive)
        assert receive.slot is not None, "a lowered table's receive has a slot"
        return self._slots[receive.kind, receive.slot][: spec.num_bytes()].view(spec.dtype).view(spec.shape)

    def check_output(self, stage: int, y: Tensor) -> None:
        """See that what a stage gives is what the next one takes.

        Raises:
            ScheduleError: it isn't.
        """
        wanted, found = self._edges[stage], TensorSpec(tuple(y.shape), y.dtype)
        if found != wanted:
            raise ScheduleError(
                f"stage {stage} gives {_words(found)} and stage {stage + 1} takes {_words(wanted)}",
                where=f"the edge from stage {stage} to stage {stage + 1}",
                rule="a stage takes what the stage before it gives, for every micro-batch alike",
                fix=f"a stage {stage} with an output of {_words(wanted)}",
            )

    def outside(self, x: Tensor) -> Tensor:
        """A tensor that outlives the slots: `x`, or a copy of it if it lies in one.

        A stage without a layer gives what it took, and a slot is free for the next receive before that is sent on.
        """
        if type(x) is not Tensor:  # what a collective gives, still under way: never a slot
            return x
        return x.clone() if x.untyped_storage().data_ptr() in self._addresses else x

    def free(self, view: Tensor) -> None:
        """Nothing uses a slot's tensor any more."""
        if self._poison:
            view.fill_(math.nan)

    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.numel() for slot in self._slots.values())

    def _spec(self, receive: Action) -> TensorSpec:
        return self._edges[receive.stage - 1 if receive.kind is ActionKind.RECV_FORWARD else receive.stage]


def _words(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
