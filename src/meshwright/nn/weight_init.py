"""Weight initialisation that depends only on the seed and the parameter's name.

A parameter is divided into blocks of rows, each drawn from its own generator seeded by (seed, name, block). A rank
draws only the blocks that overlap its shard, and the full tensor is the same on every layout, device and world size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18


def normal_shard(
    seed: int, name: str, shape: Sequence[int], *, std: float, index: Sequence[slice] | None = None
) -> Tensor:
    """Draw a shard of a parameter's initial values N(0, std²), by its name and full shape, in float32 on the CPU.

    The index is one slice with start and stop per dim; None for the full tensor.
    """
    return _shard(torch.randn, seed, name, shape, index).mul_(std)


def uniform_shard(
    seed: int, name: str, shape: Sequence[int], *, bound: float, index: Sequence[slice] | None = None
) -> Tensor:
    """Draw a shard as `normal_shard` does, of values uniform in [-bound, bound)."""
    return _shard(torch.rand, seed, name, shape, index).mul_(2 * bound).sub_(bound)


def _shard(
    draw: Callable[..., Tensor], seed: int, name: str, shape: Sequence[int], index: Sequence[slice] | None
) -> Tensor:
    index = tuple(index) if index is not None else tuple(slice(0, size) for size in shape)
    row = math.prod(shape[1:])
    rows = max(1, BLOCK_ELEMENTS // max(1, row))
    start, stop = index[0].start, index[0].stop
    found = torch.empty([dim.stop - dim.start for dim in index])

    def fill(block: int) -> None:
        first, last = block * rows, min((block + 1) * rows, shape[0])
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = draw((last - first, *shape[1:]), generator=generator)
        kept = slice(max(start, first), min(stop, last))
        found[kept.start - start : kept.stop - start] = values[
            (slice(kept.start - first, kept.stop - first), *index[1:])
        ]

    blocks = range(start // rows, math.ceil(stop / rows) if stop > start else 0)
    threads = min(torch.get_num_threads(), len(blocks))
    if threads < 2:
        for block in blocks:
            fill(block)
    else:  # drawing holds no GIL
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, blocks))
    return found
