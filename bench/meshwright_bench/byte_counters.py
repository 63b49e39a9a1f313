"""Counters of the bytes of live tensors, and of bytes sent and received, on any device.

Live bytes are bytes allocated since the counter was entered and not yet freed. The CUDA allocator records its peak; the
CPU allocator does not. The counter therefore adds each operator output's storage unless an input shares it, and
subtracts the storage when it is freed. Temporary memory inside an operator is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types

from meshwright.mesh.layout import Layout
from meshwright.reshard.dtensor import DTensorSpec, local_of, spec_of
from meshwright.reshard.dtensor.placements import placements_of
from meshwright_bench.private import (
    FakeStore,
    TorchDispatchMode,
    clear_redistribution_caches,
    redistribution,
    resolve_process_group,
    tree_leaves,
)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts live bytes while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Live bytes allocated since the count began."""
        self.peak = 0
        """Maximum of `now`."""
        self.held = 0
        """Maximum of `now` over the calls of `sample`."""
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}

    def sample(self) -> None:
        """Update `held` with the current live bytes."""
        self.held = max(self.held, self.now)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count the bytes it allocates."""
        out = func(*args, **(kwargs or {}))
        inputs = {id(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if id(storage) not in inputs and id(storage) not in self._alive:
                self._track(storage)
        self.peak = max(self.peak, self.now)
        return out

    def _track(self, storage: UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()

        def freed(reference: weakref.ref[UntypedStorage]) -> None:
            self.now -= num_bytes
            if self._alive.get(key) is reference:
                del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.now += num_bytes


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the bytes of tensors passed to c10d collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[int, ...]] = []
        """Bytes of each tensor of each call, in argument order: outputs, then inputs."""

    @property
    def total(self) -> int:
        """Total bytes on this rank."""
        return sum(map(sum, self.calls))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and record the bytes it sends."""
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.calls.append(tuple(x.numel() * x.element_size() for x in tensors))
        return func(*args, **(kwargs or {}))


_PLACEMENTS = cast(Any, placement_types)


class ReceivedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes this rank receives in the functional collectives of DTensor.

    Each collective counts as the minimum it must receive; reductions count as a ring. On CPU, DTensor has no all-to-all
    and gathers instead, which is counted as the all-to-all used on other devices.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        """Bytes received by this rank."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the bytes it receives."""
        name = func.overloadpacket.__name__ if func.namespace == "_c10d_functional" else ""
        if name in _RECEIVED_FRACTION:
            num_ranks = dist.get_world_size(resolve_process_group(args[-1]))
            self.total += int(_RECEIVED_FRACTION[name](num_ranks) * args[0].nbytes)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._original = _PLACEMENTS.shard_dim_alltoall
        _PLACEMENTS.shard_dim_alltoall = self._all_to_all
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _PLACEMENTS.shard_dim_alltoall = self._original
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _all_to_all(self, x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        num_ranks, shape = mesh.size(mesh_dim), list(x.shape)
        self.total += x.nbytes * (num_ranks - 1) // num_ranks
        shape[gather_dim] *= num_ranks
        shape[shard_dim] //= num_ranks
        return x.new_empty(shape)


_RECEIVED_FRACTION: dict[str, Callable[[int], float]] = {
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}
"""Bytes received from other ranks, relative to the bytes of the input, for a group of n ranks."""


@contextmanager
def fake_process_group(num_ranks: int) -> Iterator[None]:
    """Open a fake process group, for collectives on meta tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def redistribute_with_torch(x: DTensor, layout: Layout, *, dijkstra: bool) -> bool:
    """Redistribute with one of PyTorch's planners, starting with empty caches; return False if unsupported."""
    clear_redistribution_caches()
    current = spec_of(x)
    placements, order = placements_of(layout)
    target = DTensorSpec(x.device_mesh, placements, current.tensor_meta, shard_order=order)  # type: ignore[arg-type]
    is_default = all(DTensorSpec.is_default_device_order(spec.shard_order) for spec in (current, target))
    if not is_default and not dijkstra:
        return False  # the greedy planner only supports the default shard order
    redistribution.redistribute_local_tensor(local_of(x), current, target, use_graph_based_transform=dijkstra)
    return True


def _storages(values: Any) -> list[UntypedStorage]:
    """Return the storages of all tensors in nested containers. A live storage has exactly one Python object."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
