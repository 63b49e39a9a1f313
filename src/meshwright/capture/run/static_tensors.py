"""Static tensors of a plan, and which tensor of which micro-batch each buffer holds at the moment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.capture.lifetimes import COPIES, Content, Role
from meshwright.capture.plan import CaptureMode, CapturePlan
from meshwright.errors import CaptureError


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same numbers at the same addresses."""
    places = ((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (one, other))
    return next(places) == next(places)


@dataclass(frozen=True)
class Static:
    """A tensor of a micro-batch in the static memory of a plan."""

    memory: StaticTensors
    content: Content

    def read(self) -> Tensor:
        """Return its memory, which must hold it; see `StaticTensors.read`."""
        return self.memory.read(self.content)

    def hold(self) -> Tensor:
        """Return its memory, which is about to be written."""
        return self.memory.hold(self.content)


class StaticTensors:
    """The buffers of a plan, allocated once.

    Args:
        plan: the plan.
        device: device of the buffers.
        poisons: whether to fill what is released with NaN.
    """

    def __init__(self, plan: CapturePlan, *, device: torch.device, poisons: bool) -> None:
        self._poisons = poisons
        self._slots, self._by_slot = dict(plan.slots), plan.mode is CaptureMode.SLOT
        self._index = {(one.role, one.stage, one.layer, one.number, one.instance): one.buffer for one in plan.tensors}
        self._buffers = [torch.zeros(one.shape, dtype=getattr(torch, one.dtype), device=device) for one in plan.buffers]
        self._held: list[Content | None] = [None] * len(self._buffers)

    def has(self, content: Content) -> bool:
        """Return whether the plan has memory for a tensor."""
        return self._owner(content) in self._index

    def write(self, content: Content, value: Tensor) -> Tensor:
        """Copy a value into the buffer of `content`, and return the buffer.

        Raises:
            CaptureError: the value has another shape or dtype than planned.
        """
        buffer = self.hold(content)
        if buffer.shape != value.shape or buffer.dtype != value.dtype:
            raise CaptureError(
                f"{content} is {tuple(value.shape)} {value.dtype}, its memory {tuple(buffer.shape)} {buffer.dtype}",
                where="capture, static tensors",
                rule="a graph's tensors have the shapes and dtypes of its plan",
            )
        with torch.no_grad():
            buffer.copy_(value)
        return buffer

    def at(self, content: Content) -> Static:
        """Return a tensor by what it is."""
        return Static(self, content)

    def hold(self, content: Content) -> Tensor:
        """Return the buffer of `content`, which a graph is about to write."""
        index = self._find(content)
        self._held[index] = content
        return self._buffers[index]

    def read(self, content: Content) -> Tensor:
        """Return the buffer of `content`.

        Raises:
            CaptureError: something else has been written to it since.
        """
        index = self._find(content)
        if self._held[index] != content:
            raise CaptureError(
                f"{content} is read after {self._held[index] or 'nothing'} was written to its memory",
                where=f"capture, buffer {index}",
                rule="static tensors share memory only if they are never alive together",
            )
        return self._buffers[index]

    def is_at(self, content: Content, x: Tensor) -> bool:
        """Return whether `x` is the buffer of `content` itself."""
        index = self._index.get(self._owner(content))
        return index is not None and is_same(self._buffers[index], x)

    def release(self, content: Content) -> None:
        """Forget `content`, unless its buffer holds something else by now."""
        index = self._find(content)
        if self._held[index] == content:
            self._held[index] = None
            if self._poisons and self._buffers[index].is_floating_point():
                with torch.no_grad():
                    self._buffers[index].fill_(float("nan"))

    def clear(self) -> None:
        """Forget what the buffers hold."""
        self._held = [None] * len(self._buffers)

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the buffers."""
        return tuple(buffer.data_ptr() for buffer in self._buffers)

    def _owner(self, content: Content) -> tuple[Role, int, int, int, int]:
        by_slot, m = self._by_slot and content.role not in COPIES, content.microbatch
        instance = self._slots[content.stage][m] if by_slot else m
        return content.role, content.stage, content.layer, content.number, instance

    def _find(self, content: Content) -> int:
        index = self._index.get(self._owner(content))
        if index is None:
            raise CaptureError(
                f"{content} has no memory in the plan",
                where="capture, static tensors",
                rule="a layer that follows another one reads that layer's output as it is",
                fix="LayerSignature(…, follows=False) for a layer whose input comes from elsewhere",
            )
        return index
