"""Receive buffers of a rank, allocated before the first step at fixed addresses.

CUDA graphs need fixed addresses. There is one buffer per slot of the table, not one per micro-batch: as many buffers as
are live at once.
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
    """Shape and dtype of the tensor sent from one stage to the next, per micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ReceiveBuffers:
    """Receive slots of a rank. Activations and gradients on an edge have the same shape."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        edges: Mapping[int, TensorSpec],
        device: torch.device,
        poison: bool = False,
    ) -> None:
        """Allocate the slots of a rank of a lowered table.

        Args:
            edges: spec of the tensor sent from stage s to s+1, by s.
            poison: fill freed slots with NaN to expose use after free.
        """
        self._edges, self._poison = edges, poison
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
        spec = self._spec(receive)
        assert receive.slot is not None, "receives in a lowered table have a slot"
        return self._slots[receive.kind, receive.slot][: spec.num_bytes()].view(spec.dtype).view(spec.shape)

    def check_output(self, stage: int, y: Tensor) -> None:
        """Check that a stage's output has the shape and dtype that the next stage expects.

        Raises:
            ScheduleError: the shape or dtype differs.
        """
        expected, actual = self._edges[stage], TensorSpec(tuple(y.shape), y.dtype)
        if actual != expected:
            what = f"stage {stage} outputs {_describe(actual)}, but stage {stage + 1} expects {_describe(expected)}"
            rule = "a stage's output has the shape and dtype of the next stage's input, for every micro-batch"
            fix = f"make stage {stage} return {_describe(expected)}"
            raise ScheduleError(what, where=f"edge from stage {stage} to stage {stage + 1}", rule=rule, fix=fix)

    def copy_if_slot(self, x: Tensor) -> Tensor:
        """Return `x`, or a clone if it is a view of a slot.

        A stage without layers returns its input, and the next receive may reuse the slot before `x` is sent.
        """
        if type(x) is not Tensor:  # a pending collective result (AsyncCollectiveTensor) is never a slot
            return x
        return x.clone() if x.untyped_storage().data_ptr() in self._addresses else x

    def free(self, view: Tensor) -> None:
        """Release the slot of a tensor that is no longer used."""
        if self._poison:
            view.fill_(math.nan)

    def num_bytes(self) -> int:
        return sum(slot.numel() for slot in self._slots.values())

    def _spec(self, receive: Action) -> TensorSpec:
        return self._edges[receive.stage - 1 if receive.kind is ActionKind.RECV_FORWARD else receive.stage]


def _describe(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
