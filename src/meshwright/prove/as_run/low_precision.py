"""Find sums and weights that are kept in bfloat16 where float32 was asked: all of their values are bfloat16 numbers.

Computing in bfloat16 rounds as coarsely as reducing in it, so the size of an error can't tell them apart. But the
float32 sum of several bfloat16 contributions needs more digits, in all but about half of the elements. If only one of
several reductions is made in bfloat16, more elements are bfloat16 numbers than should be: the contributions of the
reference, summed either way, tell how many.

Shape suffixes: r dp_replicate, s dp_shard, m micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

NEARLY_ALL = 0.98
MIN_ELEMENTS = 48
"""Fewest sums to judge by: of right ones, up to about half are bfloat16 numbers by chance."""
MIN_WEIGHTS = 4
"""Fewest weights to judge by: of right ones, one in 65,536 is a bfloat16 number by chance."""
COMPARABLE = 2.0**-6
"""A contribution below this fraction of the largest one may be lost in rounding by chance."""


def is_on_grid(value: Tensor, divisors: tuple[int, ...] = (1,)) -> Tensor:
    """Return which float32 elements, times one of the divisors of a mean, are bfloat16 numbers."""
    found = torch.zeros(value.shape, dtype=torch.bool)
    for divisor in divisors:
        scaled = value.float() * divisor
        found |= scaled.bfloat16().float() == scaled
    return found


def is_summed(contributions: Tensor) -> Tensor:
    """Return which elements are sums of at least two contributions of comparable size, given [contribution, *shape]."""
    if len(contributions) < 2:
        return torch.zeros(contributions.shape[1:], dtype=torch.bool)
    top = contributions.abs().topk(2, dim=0).values
    return (top[1] > 0) & (top[1] >= COMPARABLE * top[0])


def looks_rounded(num_on_grid: int, num_elements: int, *, least: int = MIN_ELEMENTS) -> bool:
    """Return whether so many of at least `least` elements are bfloat16 numbers that all of them were rounded."""
    return num_elements >= least and num_on_grid >= NEARLY_ALL * num_elements


STAGES = {"the micro-batches": 2, "dp_shard": 1}
"""Sums before the last one, by the dim of contributions [r, s, m, *shape]; later dims are summed before."""
MIN_TOLD = 2000
"""Fewest elements to tell shares of bfloat16 numbers by."""
MIN_APART = 0.2
"""Least difference between the shares of bfloat16 numbers of right and wrong sums to tell them apart."""


@dataclass
class Shares:
    """Numbers of elements that are bfloat16 numbers: of a gradient, and of its reference summed in several ways."""

    num: int = 0
    observed: int = 0
    right: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    """By the sum that is made in bfloat16."""

    def add(self, observed: Tensor, contributions_rsm: Tensor) -> None:
        """Add a step, given the reference's contributions in the precision of the run."""
        summed = is_summed(contributions_rsm.flatten(0, 2))
        self.num += int(summed.sum())
        self.observed += int(is_on_grid(observed)[summed].sum())
        exact = contributions_rsm.float()
        self.right += int(is_on_grid(exact.sum((0, 1, 2)))[summed].sum())
        for name, dim in STAGES.items():
            if exact.shape[dim] > 1 and exact.shape[:dim].numel() > 1:
                total = exact.sum(tuple(range(dim, 3)), keepdim=True).bfloat16().float().sum((0, 1, 2))
                self.wrong[name] = self.wrong.get(name, 0) + int(is_on_grid(total)[summed].sum())

    def low_sum(self) -> str:
        """Return the sum that was made in bfloat16 by the looks of it, or an empty string."""
        told = {name: wrong for name, wrong in self.wrong.items() if wrong - self.right >= MIN_APART * self.num}
        if self.num < MIN_TOLD or not told:
            return ""
        nearest = min(told, key=lambda name: abs(told[name] - self.observed))
        return nearest if self.observed > (self.right + told[nearest]) / 2 else ""
