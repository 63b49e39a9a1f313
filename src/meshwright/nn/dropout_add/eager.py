"""Dropout + add with torch operations, the reference of the Triton program, and counter-based masks (`philox`).

Whether an element is kept is a function of the seed, the number of the dropout in the model, the token's number in the
run and the channel. No state advances, so the mask of a shard is that shard of the mask, on every layout, schedule and
device, and also under recomputation.

[Note: counters] The key is the seed (low and high half), the counter (row low half, row high half, column // 4, site).
The output's words 0 … 3 belong to columns 4c … 4c + 3. A column is kept if its word is at least `drop_threshold(p)`.

Shapes: b batch, t time, d channels, r rows, q groups of four columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.errors import ConfigError
from meshwright.nn.philox import LANES, LOW_HALF, philox

CHUNK = {"cpu": 2**18}
"""Elements of a chunk of rows, by type of device: a mask takes some hundred operations on integers, so chunks stay in a
CPU's cache. On others it is launches that cost."""


def dropout_add(
    x_rd: Tensor, residual_rd: Tensor | None, rows_r: Tensor, words: Sequence[int], *, threshold: int,
    first_column: int, out: Tensor,
) -> None:  # fmt: skip
    """Write `residual + keep · x · scale` into `out` [r, d], computed in float32, or float64 if `out` is; rounded once.

    Where x is dropped, zero is added, even if x is not finite. Without a residual, write `keep · x · scale`.
    """
    scale = keep_scale(threshold)
    compute = compute_dtype(out.dtype)
    integer = torch.int64 if compute == torch.float64 else torch.int32
    num_rows, num_columns = x_rd.shape
    chunk = max(1, CHUNK.get(x_rd.device.type, x_rd.numel()) // max(1, num_columns))
    for start in range(0, num_rows, chunk):
        part = slice(start, start + chunk)
        bits = keep_bits(rows_r[part], num_columns, words, threshold, first_column)
        kept = x_rd[part].to(compute) * scale
        kept.view(integer).bitwise_and_(bits.to(integer))
        if residual_rd is not None:
            kept += residual_rd[part].to(compute)
        out[part] = kept


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute a result of `dtype` in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class DropoutKey:
    """The constants of a dropout's masks.

    Raises:
        ConfigError: the seed or the site is out of range.
    """

    seed: int
    """Seed of the run, 64 bits."""
    site: int
    """Number of this dropout in the model, 32 bits; dropouts with the same number have the same mask."""
    words: Tensor = field(init=False, repr=False, compare=False)
    """Seed and site as int64 [2], always on the CPU. torch.compile takes a tensor as an input of the graph, whereas it
    would compile every layer again for the integers."""

    def __post_init__(self) -> None:
        for name, bits in (("seed", 64), ("site", 32)):
            value = getattr(self, name)
            if not 0 <= value < 2**bits:
                rule = f"dropout's {name} is an unsigned integer of {bits} bits"
                raise ConfigError(f"dropout's {name} = {value}", rule=rule, fix=f"use 0 … 2^{bits} - 1")
        signed = self.seed - 2**64 if self.seed >= 2**63 else self.seed
        object.__setattr__(self, "words", torch.tensor([signed, self.site], dtype=torch.int64, device="cpu"))


def drop_threshold(p: float) -> int:
    """Return the number of the 2^32 values of a random word that drop: p · 2^32, rounded half to even.

    It is exact, because scaling by a power of two is. So an element is kept with probability 1 - threshold / 2^32.

    Raises:
        ConfigError: p is outside [0, 1), or so close to 1 that nothing would be kept.
    """
    if not 0.0 <= p < 1.0 or (threshold := round(p * 2**32)) == 2**32:
        rule = "the probability of dropping is in [0, 1), and at most 1 - 2^-32"
        raise ConfigError(f"dropout p = {p}", rule=rule, fix="p = 0.1 drops one element in ten, p = 0.0 none")
    return threshold


def keep_scale(threshold: int) -> float:
    """Return the factor of kept elements, 1 / (probability of keeping), which makes dropout's expectation exact."""
    return 2.0**32 / (2**32 - threshold)


def keep_mask(key: DropoutKey, rows_bt: Tensor, num_columns: int, p: float, *, first_column: int = 0) -> Tensor:
    """Return which elements dropout keeps, bool […, d], with plain integer operations of torch; see [Note: counters].

    Rows are the tokens' numbers, int64 […], unique in the run (`attention.positions.token_rows`); columns may be a
    shard of the channels from `first_column`.
    """
    words, threshold = key.words.tolist(), drop_threshold(p)
    bits_rd = keep_bits(rows_bt.reshape(-1), num_columns, words, threshold, first_column)
    return (bits_rd != 0).view(*rows_bt.shape, num_columns)


def keep_bits(rows_r: Tensor, num_columns: int, words: Sequence[int], threshold: int, first_column: int = 0) -> Tensor:
    """Compute `keep_mask` of a list of rows as integers, -1 for kept elements and 0 for others, int64 [r, d].

    `words` are the key's. Selecting by a random bool is slow on a CPU, which mispredicts half of the branches.
    """
    seed, site = words
    groups = range(first_column // LANES, -(-(first_column + num_columns) // LANES))
    group_q = torch.arange(groups.start, groups.stop, device=rows_r.device)
    row_r1 = rows_r.unsqueeze(1)
    counter = row_r1 & LOW_HALF, (row_r1 >> 32) & LOW_HALF, group_q.unsqueeze(0), torch.full_like(group_q, site)
    word_rql = torch.stack(philox(counter, (seed & LOW_HALF, (seed >> 32) & LOW_HALF)), -1)
    start = first_column - groups.start * LANES
    bits_rd = torch.rsub(word_rql, threshold - 1).bitwise_right_shift_(63).flatten(1)
    return bits_rd[:, start : start + num_columns]
