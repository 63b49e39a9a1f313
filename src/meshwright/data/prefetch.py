"""Values made ahead of their use in a worker thread, and copies of host tensors to the device beside the computation.

The values are pure functions of keys whose order is known beforehand, so the worker has no position to save or restore:
a resumed run starts another prefetcher at its first key.

[Note: waits of a copy] A copy touches three pieces of memory on two streams and a host thread. Three waits keep them in
order, and each is necessary:

1. The compute stream waits for the copy's event before it reads the result (`Handle.wait_stream`).
2. Pinned memory is written again only after the event of the copy that reads it (`_Staging`): the host waits.
3. Fresh device memory belongs to the copy stream, so the allocator would give freed memory to the next copy at once. It
   is told that the compute stream uses it too (`record_stream`), and so keeps it until the computation is done.

`wait_stream` returns the tensors for work on the compute stream, not for the host; they can't be had in any other way.

Copies are made of the operations of `CudaStreams`: a test runs them on simulated streams, in any order that a device
might choose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from meshwright.log import get_logger

K = TypeVar("K")
V = TypeVar("V")

END_S = 10.0
"""How long leaving the context waits for a source in the middle of a read, which cannot be interrupted."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class _Failure:
    """Exception of the worker."""

    error: BaseException


class Prefetcher(Generic[K, V]):
    """Worker thread that makes the values of keys in order, while its context is open.

    Args:
        keys: keys in the order in which their values are taken.
        make: makes a key's value; called by the worker only, one key at a time.
        ahead: number of values, at least 1, that may be made or in the making before they are taken. Together with the
            values that are in use it bounds the memory.
    """

    def __init__(self, keys: Iterable[K], make: Callable[[K], V], *, ahead: int) -> None:
        assert ahead >= 1, "nothing to make ahead"
        self._keys, self._make, self._ahead = keys, make, ahead
        self._made: deque[tuple[K, V] | _Failure] = deque()
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._made.clear()
            self._changed.notify_all()
        self._thread.join(END_S)
        if self._thread.is_alive():
            _log.warning("the data source is still reading after %g s; its thread ends with the read", END_S)

    def take(self, key: K) -> V:
        """Wait for the value of the next key, which is `key`, and return it.

        Raises:
            BaseException: the exception that making it raised, with the worker's traceback; each further call raises
                it again, since the worker has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._made)
            item = self._made[0]
            if isinstance(item, _Failure):
                raise item.error
            made_key, value = item
            assert made_key == key, f"values are taken in the order of their keys: {key} instead of {made_key}"
            self._made.popleft()
            self._changed.notify_all()
        return value

    def _work(self) -> None:
        """Make one value after another until the keys or the context end, or a value fails."""
        values = ((key, self._make(key)) for key in self._keys)
        while self._has_room():
            item: tuple[K, V] | _Failure
            try:
                item = next(values, _Failure(AssertionError("all values were taken")))
            except BaseException as error:  # whatever it is, the thread that takes the value has to see it
                item = _Failure(error)
            with self._changed:
                if not self._closed:
                    self._made.append(item)
                self._changed.notify_all()
            if isinstance(item, _Failure):
                return
            del item  # the thread that takes the value frees it, however long the next one takes

    def _has_room(self) -> bool:
        """Wait until there is room for a value; return False once the context has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._made) < self._ahead)
            return not self._closed


Tensors = tuple[Tensor, ...]

NUM_STAGINGS = 2
"""Pinned copies of a batch: one is filled while the device reads the other."""


class Handle(Protocol):
    """Tensors on their way to the device."""

    def wait_stream(self) -> Tensors:
        """Make the current compute stream wait for the copy, and return the tensors for work on that stream."""


class DirectCopies:
    """Copies without streams, to a device that computes as the host tells it: CPU tensors stay as they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, tensors: Tensors) -> Handle:
        """Start copying CPU tensors, which must not be written from now on, to fresh memory of the device."""
        return _Arrived(tuple(x.to(self._device) for x in tensors))


class StreamCopies:
    """Copies through pinned memory on one persistent stream; for one thread at a time. [Note: waits of a copy]"""

    def __init__(self, streams: CudaStreams) -> None:
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


def open_copies(device: torch.device) -> DirectCopies | StreamCopies:
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

    def __init__(self, streams: CudaStreams, tensors: Tensors, copied: Event) -> None:
        self._streams, self._tensors, self._copied = streams, tensors, copied

    def wait_stream(self) -> Tensors:
        self._streams.compute_waits(self._copied)
        for x in self._tensors:
            self._streams.keep_for_compute(x)
        return self._tensors


class _Arrived:
    """Handle of tensors that are there."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def wait_stream(self) -> Tensors:
        return self._tensors


Event = Any
"""A point in a stream's work; opaque to all but the streams that recorded it."""


class CudaStreams:
    """A copy stream of its own on a CUDA device, and the stream on which the calling thread computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned_like(self, x: Tensor) -> Tensor:
        """Allocate host memory with the shape and dtype of `x` from which the device can copy by itself."""
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)

    def empty_like(self, x: Tensor) -> Tensor:
        """Allocate device memory with the shape and dtype of `x`, for the copy stream to write."""
        with torch.cuda.stream(self._copies):
            return torch.empty(x.shape, dtype=x.dtype, device=self._device)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Launch a copy from pinned memory to device memory on the copy stream."""
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)

    def copy_event(self) -> torch.cuda.Event:
        """Record an event after all work launched on the copy stream."""
        event: torch.cuda.Event = self._copies.record_event()
        return event

    def compute_waits(self, event: torch.cuda.Event) -> None:
        """Make the current compute stream wait for an event; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def host_waits(self, event: torch.cuda.Event) -> None:
        """Make the host wait for an event, with the GIL released."""
        event.synchronize()

    def keep_for_compute(self, x: Tensor) -> None:
        """Keep the memory of `x`, once freed, until the current compute stream has done the work launched by then."""
        x.record_stream(torch.cuda.current_stream(self._device))
