"""Operations on streams, events and pinned memory that copies to a device are made of, and their CUDA implementation.

An interface, so that a test can run the copies on simulated streams in any order that a device might choose.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Event = Any
"""A point in a stream's work; opaque to all but the streams that recorded it."""


class Streams(Protocol):
    """A copy stream of its own, and the stream on which the calling thread computes."""

    def pinned_like(self, x: Tensor) -> Tensor:
        """Allocate host memory with the shape and dtype of `x` from which the device can copy by itself."""

    def empty_like(self, x: Tensor) -> Tensor:
        """Allocate device memory with the shape and dtype of `x`, for the copy stream to write."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Launch a copy from pinned memory to device memory on the copy stream."""

    def copy_event(self) -> Event:
        """Record an event after all work launched on the copy stream."""

    def compute_waits(self, event: Event) -> None:
        """Make the current compute stream wait for an event; the host goes on."""

    def host_waits(self, event: Event) -> None:
        """Make the host wait for an event."""

    def keep_for_compute(self, x: Tensor) -> None:
        """Keep the memory of `x`, once freed, until the current compute stream has done the work launched by then."""


class CudaStreams:
    """Streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned_like(self, x: Tensor) -> Tensor:
        """Allocate pinned host memory."""
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)

    def empty_like(self, x: Tensor) -> Tensor:
        """Allocate device memory that belongs to the copy stream."""
        with torch.cuda.stream(self._copies):
            return torch.empty(x.shape, dtype=x.dtype, device=self._device)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Launch a copy on the copy stream."""
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)

    def copy_event(self) -> torch.cuda.Event:
        """Record an event on the copy stream."""
        event: torch.cuda.Event = self._copies.record_event()
        return event

    def compute_waits(self, event: torch.cuda.Event) -> None:
        """Make the calling thread's current stream wait."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def host_waits(self, event: torch.cuda.Event) -> None:
        """Wait, with the GIL released."""
        event.synchronize()

    def keep_for_compute(self, x: Tensor) -> None:
        """Tell the allocator that the calling thread's current stream uses `x`."""
        x.record_stream(torch.cuda.current_stream(self._device))
