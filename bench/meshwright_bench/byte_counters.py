"""Counting the bytes of tensors that are alive, and of those that are sent, on any device.

What is alive was allocated while the count ran and still exists. An allocator's own peak would do on CUDA; on CPU there
is none. So every storage that an operation gives back, and that none of its inputs has, is weighed when it appears and
taken off when it is freed. Room that an operation uses inside and returns is not seen.
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
    forget_redistribution_plans,
    redistribution,
    resolve_process_group,
    tree_leaves,
)


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


_PLACEMENTS = cast(Any, placement_types)


class ReceivedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts what this rank receives from others in the functional collectives that DTensor calls.

    By the least that each must: a ring's, for sums. On CPU DTensor has no all-to-all and gathers instead; that is
    counted as the all-to-all it has on other devices.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        """Bytes so far, by this rank."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and weigh what it brings."""
        name = func.overloadpacket.__name__ if func.namespace == "_c10d_functional" else ""
        if name in _SHARES:
            num_ranks = dist.get_world_size(resolve_process_group(args[-1]))
            self.total += int(_SHARES[name](num_ranks) * args[0].nbytes)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._theirs = _PLACEMENTS.shard_dim_alltoall
        _PLACEMENTS.shard_dim_alltoall = self._all_to_all
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _PLACEMENTS.shard_dim_alltoall = self._theirs
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _all_to_all(self, x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        num_ranks, shape = mesh.size(mesh_dim), list(x.shape)
        self.total += x.nbytes * (num_ranks - 1) // num_ranks
        shape[gather_dim] *= num_ranks
        shape[shard_dim] //= num_ranks
        return x.new_empty(shape)


_SHARES: dict[str, Callable[[int], float]] = {
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}
"""Of the bytes that go in, those that come from others."""


@contextmanager
def fake_process_group(num_ranks: int) -> Iterator[None]:
    """A process group of ranks that exist in name only, for collectives on meta tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def torch_redistributes(x: DTensor, layout: Layout, *, dijkstra: bool) -> bool:
    """Redistribute by one of PyTorch's planners, with no memory of what it planned before; False if it can't."""
    forget_redistribution_plans()
    current = spec_of(x)
    placements, order = placements_of(layout)
    target = DTensorSpec(x.device_mesh, placements, current.tensor_meta, shard_order=order)  # type: ignore[arg-type]
    is_default = all(DTensorSpec.is_default_device_order(spec.shard_order) for spec in (current, target))
    if not is_default and not dijkstra:
        return False  # the greedy planner only has the axes' own order
    redistribution.redistribute_local_tensor(local_of(x), current, target, use_graph_based_transform=dijkstra)
    return True


def _storages(values: Any) -> list[UntypedStorage]:
    """Those of all tensors in nested lists, tuples and mappings. A storage keeps one Python object while it lives."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
