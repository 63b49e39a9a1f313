"""Copies of host tensors to the device, beside the computation.

[Note: waits of a copy] A copy touches three pieces of memory on two streams and a host thread. Three waits keep them in
order, and each is necessary:

1. The compute stream waits for the copy's event before it reads the result (`Handle.wait_stream`).
2. Pinned memory is written again only after the event of the copy that reads it (`_Staging`): the host waits.
3. Fresh device memory belongs to the copy stream, so the allocator would give freed memory to the next copy at once. It
   is told that the compute stream uses it too (`record_stream`), and so keeps it until the computation is done.

`wait_stream` returns the tensors for work on the compute stream, not for the host; they can't be had in any other way.

Copies are made of the operations of `Streams`: a test runs them on simulated streams, in any order that a device might
choose.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]

NUM_STAGINGS = 2
"""Pinned copies of a batch: one is filled while the device reads the other."""


class Handle(Protocol):
    """Tensors on their way to the device."""

    def wait_stream(self) -> Tensors:
        """Make the current compute stream wait for the copy, and return the tensors for work on that stream."""


class Copies(Protocol):
    """A way to the device."""

    def start(self, tensors: Tensors) -> Handle:
        """Start copying CPU tensors, which must not be written from now on, to fresh memory of the device."""


class DirectCopies:
    """Copies without streams, to a device that computes as the host tells it: CPU tensors stay as they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, tensors: Tensors) -> Handle:
        """Copy at once."""
        return _Arrived(tuple(x.to(self._device) for x in tensors))


class StreamCopies:
    """Copies through pinned memory on one persistent stream; for one thread at a time. [Note: waits of a copy]"""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stagings: deque[_Staging] = deque()

    def start(self, tensors: Tensors) -> Handle:
        """Start copying CPU tensors of any shape and dtype, and return when they may be written again."""
        streams, staging = self._streams, self._free_staging(tensors)
        for x, pinned in zip(tensors, staging.tensors, strict=True):
            pinned.copy_(x)
        targets = tuple(streams.empty_like(x) for x in tensors)
        for pinned, target in zip(staging.tensors, targets, strict=True):
            streams.copy(pinned, target)
        staging.copied = streams.copy_event()
        self._stagings.append(staging)
        return _Copying(streams, targets, staging.copied)

    def _free_staging(self, tensors: Tensors) -> _Staging:
        """Return pinned memory for the tensors that no copy reads any more."""
        if len(self._stagings) == NUM_STAGINGS:
            oldest = self._stagings.popleft()
            self._streams.host_waits(oldest.copied)
            if oldest.fits(tensors):
                return oldest
        return _Staging(tuple(self._streams.pinned_like(x) for x in tensors))


def open_copies(device: torch.device) -> Copies:
    """Return the way to a device."""
    return StreamCopies(CudaStreams(device)) if device.type == "cuda" else DirectCopies(device)


class _Staging:
    """Pinned memory of a batch, and the event of the copy that reads it."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.copied: Event = None

    def fits(self, tensors: Tensors) -> bool:
        """Return whether the shapes and dtypes are those of `tensors`."""
        return [(x.shape, x.dtype) for x in self.tensors] == [(x.shape, x.dtype) for x in tensors]


class _Copying:
    """Handle of a copy on the copy stream."""

    def __init__(self, streams: Streams, tensors: Tensors, copied: Event) -> None:
        self._streams, self._tensors, self._copied = streams, tensors, copied

    def wait_stream(self) -> Tensors:
        """Order the compute stream after the copy, and the allocator's reuse after the compute stream."""
        self._streams.compute_waits(self._copied)
        for x in self._tensors:
            self._streams.keep_for_compute(x)
        return self._tensors


class _Arrived:
    """Handle of tensors that are there."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def wait_stream(self) -> Tensors:
        """Return the tensors."""
        return self._tensors


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
