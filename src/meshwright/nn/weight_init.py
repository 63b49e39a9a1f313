"""Weight initialisation that depends only on the seed and the parameter's name.

A parameter is divided into blocks, each drawn from its own generator seeded by (seed, name, block). A rank draws only
the blocks that overlap its shard, and the full tensor is the same on every layout, device and world size. Blocks are
drawn in full: PyTorch's generator on the CPU is sequential, and passing over values takes as long as drawing them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""Elements of a block, which has full rows."""
LARGE_ELEMENTS = 1 << 22
"""Elements from which on a parameter is divided along all dims, so that a shard along any dim draws little else."""
LARGE_BLOCK_ELEMENTS, LARGE_BLOCK_COLUMNS = 1 << 15, 128
"""Elements of a large parameter's block, and the most of them along the last dim."""

Box = Sequence[tuple[int, int]]
"""First and last index, exclusive, along each dim."""


def normal_shard(seed: int, name: str, shape: Sequence[int], *, std: float, index: Sequence[slice] | None = None,
                 out: Tensor | None = None, pool: ThreadPoolExecutor | None = None) -> Tensor:  # fmt: skip
    """Draw a shard of a parameter's initial values N(0, std²), by its name and full shape, in float32 on the CPU.

    Args:
        seed: the run's seed.
        name: name of the parameter in the full model.
        shape: its full shape.
        std: standard deviation.
        index: one slice with start and stop per dim; None for the full tensor.
        out: where the values go, float32 on the CPU; None for a new tensor.
        pool: threads that draw, as many as PyTorch's; None for this one.
    """

    def draw(block: Tensor, generator: torch.Generator) -> Any:
        values = block.normal_(generator=generator).numpy()
        return np.multiply(values, np.float32(std), out=values)

    return _shard(draw, seed, name, shape, index, out, pool)


def uniform_shard(seed: int, name: str, shape: Sequence[int], *, bound: float, index: Sequence[slice] | None = None,
                  out: Tensor | None = None, pool: ThreadPoolExecutor | None = None) -> Tensor:  # fmt: skip
    """Draw a shard as `normal_shard` does, of values uniform in [-bound, bound)."""

    def draw(block: Tensor, generator: torch.Generator) -> Any:
        values = block.uniform_(generator=generator).numpy()
        return np.subtract(np.multiply(values, np.float32(2 * bound), out=values), np.float32(bound), out=values)

    return _shard(draw, seed, name, shape, index, out, pool)


def _shard(
    draw: Callable[[Tensor, torch.Generator], Any],
    seed: int,
    name: str,
    shape: Sequence[int],
    index: Sequence[slice] | None,
    out: Tensor | None,
    pool: ThreadPoolExecutor | None,
) -> Tensor:
    wanted = [(0, size) for size in shape] if index is None else [(one.start, one.stop) for one in index]
    found = torch.empty([stop - start for start, stop in wanted]) if out is None else out
    values, blocks = found.detach().numpy(), list(_blocks(shape, wanted)) if found.numel() else []

    def fill(some: Iterable[tuple[int, Box]]) -> None:
        # NumPy computes in this thread: PyTorch would start OpenMP's threads for each of the pool's. All blocks are
        # drawn in the same memory: for each the system would map and clear new pages, while other threads wait.
        memory = torch.empty(0)
        for number, box in some:
            digest = hashlib.sha256(f"{seed}/{name}/{number}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            size = [stop - start for start, stop in box]
            if len(memory) < math.prod(size):
                memory = torch.empty(math.prod(size))
            drawn = draw(memory[: math.prod(size)].view(size), generator)
            kept = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, box, strict=True)]
            values[_within(kept, wanted)] = drawn[_within(kept, box)]

    if pool is None:
        fill(blocks)
    else:  # drawing holds no GIL
        each = max(1, math.ceil(len(blocks) / torch.get_num_threads()))  # neighbours, which may share pages of memory
        list(pool.map(fill, (blocks[first : first + each] for first in range(0, len(blocks), each))))
    return found


def _within(box: Box, other: Box) -> tuple[slice, ...]:
    """Return where a box is in one around it."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, other, strict=True))


def _blocks(shape: Sequence[int], wanted: Box) -> Iterable[tuple[int, Box]]:
    """Yield number and box of the blocks that overlap the wanted box."""
    sizes = _block_sizes(shape)
    counts = [math.ceil(size / step) for size, step in zip(shape, sizes, strict=True)]
    overlap = (range(a // step, math.ceil(b / step)) for (a, b), step in zip(wanted, sizes, strict=True))
    for position in itertools.product(*overlap):
        number = 0
        for at, count in zip(position, counts, strict=True):
            number = number * count + at
        yield number, [(at * by, min((at + 1) * by, end)) for at, by, end in zip(position, sizes, shape, strict=True)]


def _block_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the size of a block along each dim; the last one along a dim may be smaller."""
    row = math.prod(shape[1:])
    if shape[0] * row < LARGE_ELEMENTS:
        return (max(1, BLOCK_ELEMENTS // max(1, row)), *shape[1:])
    sizes, left = list[int](), LARGE_BLOCK_ELEMENTS
    for size in reversed(shape[1:]):
        sizes.append(min(size, left if sizes else LARGE_BLOCK_COLUMNS))
        left //= sizes[-1]
    return (left, *reversed(sizes))
