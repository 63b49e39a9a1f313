"""A layer's CUDA graphs, simulated on any device: operations run eagerly, in memory laid out as graphs would have it.

What the forward leaves to the backward lies at fixed addresses of a memory pool, temporary memory is filled with NaN on
each replay, and static tensors are read where they lie when they are read. A wrong plan therefore computes wrong
gradients, or NaN, here as on a device; a right one computes bitwise those of eager execution.

Not simulated are tensors that a recomputed block keeps by itself: they lie in memory of their own.

Memory pools of simulated CUDA graphs: an arena per pool, with the addresses that tensors would have on a device.

While graphs are captured, a pool hands out blocks first fit, and takes back what a graph frees. From then on each
replay writes to the same addresses. A block that an earlier graph had freed may thus be given to a later graph: on
replay, the earlier graph overwrites it. That is right if the later graph always runs after the earlier one and before
its next replay, and silent corruption if not. The simulation fills temporary memory with NaN, so that corruption shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.run.backend import CapturedLayer, LayerGraphs, contributing, deferring, reached, store_sums
from meshwright.capture.run.observe import flatten
from meshwright.capture.run.private import TorchDispatchMode, using_parameters
from meshwright.capture.run.static_tensors import Static
from meshwright.errors import CaptureError
from meshwright.nn.deferred_weight_gradients import DeferredGradient
from meshwright.nn.step_handles import StepHandle


@dataclass(frozen=True)
class _Reference:
    """A tensor that lies in a block of the pool, or in a static tensor."""

    place: Block | Static
    like: Tensor
    """Shape, strides and dtype, without memory."""
    offset: int = 0
    """Elements before it in the static tensor."""


@dataclass
class _Region:
    """Blocks of a captured graph, in the order in which it asks for them."""

    temporary: Block | None = None
    blocks: list[Block] = field(default_factory=list)


class SimulatedGraphs(LayerGraphs):
    """Graphs of one layer and instance.

    Args:
        layer: the layer.
        pool: memory pool of the graphs.
        frees: give the memory that the backward is done with to graphs captured later. Right in a pool of its own only
            if the forward is never replayed again.
        backwards: number of the forward's backwards to capture; each micro-batch replays one of them.
    """

    def __init__(self, layer: CapturedLayer, pool: MemoryPool, *, frees: bool, backwards: int) -> None:
        self._layer, self._pool, self._frees, self._to_capture = layer, pool, frees, backwards
        self._weights, self._replacements = layer.weights.trained(), layer.weights.replacements()
        self._position = {id(weight): at for at, weight in enumerate(self._weights)}
        owned = (*self._replacements.values(), *layer.module.buffers())
        self._kept = set(map(_address, owned))
        """Storages that outlive the micro-batch."""
        self._regions: dict[str, _Region] = {}
        self._addresses: dict[str, tuple[int, ...]] = {}
        self._roots: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._statics: dict[int, Static] = {}
        """Static tensors that this micro-batch uses, by address."""
        self._deferred: list[tuple[int, Callable[..., Tensor | None], list[_Reference | Tensor]]] = []
        self.contributions: dict[StepHandle, Tensor] = {}
        self.reaches: list[frozenset[int]] = []

    def forward(self, inputs: Sequence[Static], outputs: Sequence[Static]) -> None:
        """Run the forward on the static inputs, and write the static outputs."""
        self._check("forward", [one.read() for one in inputs])
        facts, order = self._layer.observed.inputs, self._layer.observed.order()
        self._statics = {_address(one.read()): one for one in inputs}
        packed: list[tuple[Tensor, list[Any]]] = []

        def pack(t: Tensor) -> list[Any]:
            cell: list[Any] = [t]
            packed.append((t, cell))
            return cell

        self._leaves = [
            one.read().detach().requires_grad_(f.requires_grad) for one, f in zip(inputs, facts, strict=True)
        ]
        saving = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)
        with self._graph("forward"), torch.enable_grad(), saving, contributing(self._layer.handles) as contributions:
            results = flatten(self._layer.run(self._leaves))[1]
        for handle, value in contributions.items():
            self.contributions.setdefault(handle, torch.empty_like(value)).copy_(value)
        results = [results[at] for at in order]
        produced = {_address(one): static for one, static in zip(results, outputs, strict=True) if one.is_contiguous()}
        region, number = self._regions["forward"], 0
        with torch.no_grad():
            for one, static in zip(results, outputs, strict=True):
                static.hold().copy_(one)
        for saved, cell in packed:
            address = _address(saved)
            if address in self._statics:
                cell[0] = self._static_reference(self._statics[address], saved)
            elif address in produced:
                cell[0] = self._static_reference(produced[address], saved)
            elif address not in self._kept:
                cell[0] = self._store(region, number, saved)
                number += 1
        self._statics |= {_address(one.read()): one for one in outputs}
        self._roots = [one for one in results if one.requires_grad]
        self.reaches = reached(self._roots, [*(leaf for leaf in self._leaves if leaf.requires_grad), *self._weights])

    def backward(
        self, gradients: Sequence[Static | None], found: Sequence[Static | None], *, defers: bool
    ) -> Sequence[int]:
        """Run the backward on the static gradients of the outputs, and write those of the inputs."""
        given = [one for one in gradients if one is not None]
        self._check("backward", [one.read() for one in given])
        self._statics |= {_address(one.read()): one for one in given}
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        name = "split backward" if defers else "backward"
        with deferring(self._layer.store, defers) as entries, self._graph(name):
            all_found = torch.autograd.grad(
                self._roots,
                [*wanted, *self._weights],
                [one.read() for one in given],
                allow_unused=True,
                retain_graph=self._to_capture > 1,
            )
        self._defer(entries)
        of_weights = {at: one for at, one in enumerate(all_found[len(wanted) :]) if one is not None}
        for at, gradient in of_weights.items():
            self._layer.gradients.store(at, gradient)
        with torch.no_grad():
            for static, gradient in zip([one for one in found if one is not None], all_found, strict=False):
                static.hold().zero_() if gradient is None else static.hold().copy_(gradient)
        self._to_capture -= 1
        if self._to_capture <= 0:
            self._roots, self._leaves = [], []
        return list(of_weights)

    def deferred(self) -> list[int]:
        """Return the positions of the deferred weights."""
        return [position for position, _, _ in self._deferred]

    def weights(self) -> None:
        """Compute the weight gradients that the backward has deferred."""
        computed = ((at, compute(*(self._unpack([t]) for t in tensors))) for at, compute, tensors in self._deferred)
        store_sums(self._layer.gradients, computed)
        self._deferred = []

    def finish(self) -> None:
        """Poison what the micro-batch has left, unless another backward of it is still to be captured."""
        if self._to_capture > 0:
            return
        for name in ("forward", "deferred"):
            region = self._regions.get(name, _Region())
            for block in region.blocks:
                self._pool.poison(block)
                if self._frees:
                    self._pool.free(block)
        self._frees = False  # addresses stay what they are; only graphs captured from now on get them

    def _check(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Check that a graph finds its tensors where it was captured with them."""
        found = tuple(t.data_ptr() for t in tensors)
        if self._addresses.setdefault(name, found) != found:
            raise CaptureError(
                f"the {name} of {self._layer.name} gets tensors at other addresses than it was captured with",
                where="capture, simulate",
                rule="a graph reads and writes fixed addresses",
            )

    def times(self) -> None:
        """Return None: replays run eagerly."""

    def _defer(self, entries: Sequence[DeferredGradient]) -> None:
        region, number = self._regions.setdefault("deferred", _Region()), 0
        for parameter, compute, tensors in entries:
            references: list[_Reference | Tensor] = []
            for t in tensors:
                address = _address(t)
                if address in self._kept:
                    references.append(t)
                elif address in self._statics:
                    references.append(self._static_reference(self._statics[address], t))
                else:
                    references.append(self._store(region, number, t))
                    number += 1
            self._deferred.append((self._position[id(parameter)], compute, references))

    def _static_reference(self, static: Static, t: Tensor) -> _Reference:
        return _Reference(static, _without_memory(t), int(t.storage_offset()))

    def _store(self, region: _Region, number: int, t: Tensor) -> _Reference:
        """Copy a tensor to the region's block of this number, which the first call allocates."""
        if number == len(region.blocks):
            region.blocks.append(self._pool.allocate(_extent_bytes(t)))
        reference = _Reference(region.blocks[number], _without_memory(t))
        self._pool.view(region.blocks[number], t).copy_(t.detach())
        return reference

    def _unpack(self, cell: list[Any]) -> Tensor:
        (reference,) = cell
        if not isinstance(reference, _Reference):
            assert isinstance(reference, Tensor)
            return reference
        if isinstance(reference.place, Block):
            return self._pool.view(reference.place, reference.like)
        like = reference.like
        return reference.place.read().detach().as_strided(like.shape, like.stride(), reference.offset)

    @contextmanager
    def _graph(self, name: str) -> Iterator[None]:
        """Context of the operations of a graph."""
        region = self._regions.setdefault(name, _Region())
        with using_parameters(self._layer.module, self._replacements):
            if region.temporary is not None:
                yield
            else:
                with _Results() as results:
                    yield
                # A block as large as all results: at once is the worst case.
                region.temporary = self._pool.allocate(results.num_bytes)
                self._pool.free(region.temporary)
        self._pool.poison(region.temporary)


class _Results(TorchDispatchMode):
    """Context that adds up the bytes of the results of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_bytes += sum(_extent_bytes(t) for t in flatten(result)[1])
        return result


def _address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _without_memory(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _extent_bytes(t: Tensor) -> int:
    return extent(t) * t.element_size()


ALIGNMENT = 64


@dataclass(frozen=True)
class Block:
    """Bytes of a pool."""

    start: int
    num_bytes: int


@dataclass
class MemoryPool:
    """Arena with a first-fit allocator. It grows while graphs are captured, so each access takes a view of its own."""

    num_bytes: int = 0
    """Size reserved so far."""
    is_closed: bool = False
    """Whether all graphs are captured: replays use the memory that they were captured with."""
    _free: list[Block] = field(default_factory=list)
    _arena: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def allocate(self, num_bytes: int) -> Block:
        """Return a block, the first free one that is large enough, or a new one."""
        assert not self.is_closed, "a replay allocates nothing"
        size = -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT
        for index, free in enumerate(self._free):
            if free.num_bytes >= size:
                rest = Block(free.start + size, free.num_bytes - size)
                self._free[index : index + 1] = [rest] if rest.num_bytes else []
                return Block(free.start, size)
        block = Block(self.num_bytes, size)
        self.num_bytes += size
        self._arena = torch.cat([self._arena, torch.zeros(size, dtype=torch.uint8)])
        return block

    def close(self) -> int:
        """End capturing, and return the size: from now on, nothing is allocated."""
        self.is_closed = True
        return self.num_bytes

    def free(self, block: Block) -> None:
        """Take a block back for graphs that are captured later; neighbouring free blocks become one."""
        merged: list[Block] = []
        for one in sorted([*self._free, block], key=lambda free: free.start):
            if merged and merged[-1].start + merged[-1].num_bytes == one.start:
                merged[-1] = Block(merged[-1].start, merged[-1].num_bytes + one.num_bytes)
            else:
                merged.append(one)
        self._free = merged

    def view(self, block: Block, like: Tensor) -> Tensor:
        """Return a block as a tensor with the shape, strides and dtype of another one."""
        length = extent(like)
        flat = self._arena[block.start : block.start + length * like.element_size()].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def poison(self, block: Block) -> None:
        """Fill a block with bytes that are NaN in every floating-point type, and negative integers."""
        self._arena[block.start : block.start + block.num_bytes].fill_(0xFF)


def extent(x: Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor in its storage."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
