"""A layer's CUDA graphs, simulated on any device: operations run eagerly, in memory laid out as graphs would have it.

What the forward leaves to the backward lies at fixed addresses of a memory pool, temporary memory is filled with NaN on
each replay, and static tensors are read where they lie when they are read. A wrong plan therefore computes wrong
gradients, or NaN, here as on a device; a right one computes bitwise those of eager execution.

Not simulated are tensors that a recomputed block keeps by itself: they lie in memory of their own.

A memory pool is an arena with the addresses that tensors would have on a device. While graphs are captured, it hands
out blocks first fit, and takes back what a graph frees. From then on each replay writes to the same addresses. A block
that an earlier graph had freed may thus be given to a later graph: on replay, the earlier graph overwrites it. That is
right if the later graph always runs after the earlier one and before its next replay, and silent corruption if not. The
simulation fills temporary memory with NaN, so that corruption shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.capture.run.backend import CapturedLayer, EagerGraphs, contributing, deferring
from meshwright.capture.run.observe import flatten
from meshwright.capture.run.private import TorchDispatchMode
from meshwright.capture.run.static_tensors import Static
from meshwright.errors import CaptureError
from meshwright.nn.linear import DeferredGradient

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
    is_closed: bool = False
    """Whether all graphs are captured: replays use the memory that they were captured with."""
    _free: list[Block] = field(default_factory=list)
    _arena: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def allocate(self, num_bytes: int) -> Block:
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
        length = _extent(like)
        flat = self._arena[block.start : block.start + length * like.element_size()].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def poison(self, block: Block) -> None:
        """Fill a block with bytes that are NaN in every floating-point type, and negative integers."""
        self._arena[block.start : block.start + block.num_bytes].fill_(0xFF)


def _extent(x: Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor in its storage."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


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


class SimulatedGraphs(EagerGraphs):
    """Graphs of one layer and instance.

    Args:
        frees: give the memory that the backward is done with to graphs captured later. Right in a pool of its own only
            if the forward is never replayed again.
        backwards: number of the forward's backwards to capture; each micro-batch replays one of them.
    """

    def __init__(self, layer: CapturedLayer, pool: MemoryPool, *, frees: bool, backwards: int) -> None:
        super().__init__(layer, backwards=backwards)
        self._pool, self._frees = pool, frees
        self._kept = set(map(_address, (*self._replacements.values(), *layer.module.buffers())))
        self._regions: dict[str, _Region] = {}
        self._addresses: dict[str, tuple[int, ...]] = {}
        self._statics: dict[int, Static] = {}
        """Static tensors that this micro-batch uses, by address."""

    def forward(self, inputs: Sequence[Static], outputs: Sequence[Static]) -> None:
        """Run the forward on the static inputs, and write the static outputs."""
        sources = [one.read() for one in inputs]
        self._check("forward", sources)
        self._statics = dict(zip(map(_address, sources), inputs, strict=True))
        packed: list[tuple[Tensor, list[Any]]] = []

        def pack(t: Tensor) -> list[Any]:
            packed.append((t, [t]))
            return packed[-1][1]

        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda cell: self._unpack(cell[0]))
        with self._graph("forward"), saving, contributing(self._layer.handles) as contributions:
            results = self._results(sources)
        for handle, value in contributions.items():
            self.contributions.setdefault(handle, torch.empty_like(value)).copy_(value)
        produced = {_address(one): static for one, static in zip(results, outputs, strict=True) if one.is_contiguous()}
        with torch.no_grad():
            for one, static in zip(results, outputs, strict=True):
                static.hold().copy_(one)
        region, number = self._regions["forward"], 0
        for saved, cell in packed:
            address = _address(saved)
            if static_of := self._statics.get(address, produced.get(address)):
                cell[0] = _static_reference(static_of, saved)
            elif address not in self._kept:
                cell[0] = self._keep(region, number, saved)
                number += 1
        self._statics |= {_address(one.read()): one for one in outputs}
        self._keep_roots(results)

    def backward(
        self, gradients: Sequence[Static | None], found: Sequence[Static | None], *, defers: bool
    ) -> Sequence[int]:
        """Run the backward on the static gradients of the outputs, and write those of the inputs."""
        statics = [one for one in gradients if one is not None]
        given = [one.read() for one in statics]
        self._check("backward", given)
        self._statics |= zip(map(_address, given), statics, strict=True)
        name = "split backward" if defers else "backward"
        with deferring(self._layer.store, defers) as entries, self._graph(name):
            of_inputs, of_weights = self._gradients(given)
        self._defer(entries)
        self._store(name, of_weights)
        with torch.no_grad():
            for static, gradient in zip([one for one in found if one is not None], of_inputs, strict=True):
                static.hold().zero_() if gradient is None else static.hold().copy_(gradient)
        return self._stored[name]

    def finish(self) -> None:
        """Poison what the micro-batch has left, unless another backward of it is still to be captured."""
        if self._remaining > 0:
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

    def _defer(self, entries: Sequence[DeferredGradient]) -> None:
        super()._defer(entries)
        region, number = self._regions.setdefault("deferred", _Region()), 0
        for at, (position, compute, tensors) in enumerate(self._deferred):
            references: list[_Reference | Tensor] = []
            for t in tensors:
                address = _address(t)
                if address in self._kept:
                    references.append(t)
                elif address in self._statics:
                    references.append(_static_reference(self._statics[address], t))
                else:
                    references.append(self._keep(region, number, t))
                    number += 1
            self._deferred[at] = position, compute, references

    def _keep(self, region: _Region, number: int, t: Tensor) -> _Reference:
        """Copy a tensor to the region's block of this number, which the first call allocates."""
        if number == len(region.blocks):
            region.blocks.append(self._pool.allocate(_extent_bytes(t)))
        self._pool.view(region.blocks[number], t).copy_(t.detach())
        return _Reference(region.blocks[number], _without_memory(t))

    def _unpack(self, tensor: _Reference | Tensor) -> Tensor:
        if not isinstance(tensor, _Reference):
            return tensor
        if isinstance(tensor.place, Block):
            return self._pool.view(tensor.place, tensor.like)
        like = tensor.like
        return tensor.place.read().detach().as_strided(like.shape, like.stride(), tensor.offset)

    @contextmanager
    def _graph(self, name: str) -> Iterator[None]:
        region = self._regions.setdefault(name, _Region())
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


def _static_reference(static: Static, t: Tensor) -> _Reference:
    return _Reference(static, _without_memory(t), int(t.storage_offset()))


def _without_memory(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _extent_bytes(t: Tensor) -> int:
    return _extent(t) * t.element_size()
