"""Memory pools of simulated CUDA graphs: an arena per pool, with the addresses that tensors would have on a device.

While graphs are captured, a pool hands out blocks first fit, and takes back what a graph frees. From then on each
replay writes to the same addresses. A block that an earlier graph had freed may thus be given to a later graph: on
replay, the earlier graph overwrites it. That is right if the later graph always runs after the earlier one and before
its next replay, and silent corruption if not. The simulation fills temporary memory with NaN, so that corruption shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

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
