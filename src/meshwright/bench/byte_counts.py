"""Counting the bytes of tensors that are alive, and of those that are sent, on any device.

What is alive was allocated while the count ran and still exists. An allocator's own peak would do on CUDA; on CPU there
is none. So every storage that an operation gives back, and that none of its inputs has, is weighed when it appears and
taken off when it is freed. Room that an operation uses inside and returns is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from meshwright.bench.private import TorchDispatchMode, tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes alive of what was allocated since the count began."""
        self.peak = 0
        """The most there ever was of it."""
        self.held = 0
        """The most there was of it at a call of `sample`."""
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}

    def sample(self) -> None:
        """Note what is held at this moment."""
        self.held = max(self.held, self.now)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and weigh what it allocated."""
        out = func(*args, **(kwargs or {}))
        given = {id(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if id(storage) not in given and id(storage) not in self._alive:
                self._weigh(storage)
        self.peak = max(self.peak, self.now)
        return out

    def _weigh(self, storage: UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()

        def freed(reference: weakref.ref[UntypedStorage]) -> None:
            self.now -= num_bytes
            if self._alive.get(key) is reference:
                del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.now += num_bytes


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts the bytes of the tensors that are handed to collectives of c10d."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[int, ...]] = []
        """For each call so far, the bytes of the tensors that it was given, in their order: outputs, then inputs."""

    @property
    def total(self) -> int:
        """Bytes so far, by this rank."""
        return sum(map(sum, self.calls))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and weigh what it sends."""
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.calls.append(tuple(x.numel() * x.element_size() for x in tensors))
        return func(*args, **(kwargs or {}))


def _storages(values: Any) -> list[UntypedStorage]:
    """Those of all tensors in nested lists, tuples and mappings. A storage keeps one Python object while it lives."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
