"""Plans run on real data: every rank ends with what slicing gives it, replicas with the same bits."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.execute import execute
from meshwright.reshard.groups import groups_of, prepare
from meshwright.reshard.planner import plan
from meshwright.reshard.steps import Step, StepKind
from tests.reshard.moves import before, direct, fold, part, plan_of, value

WORDS = ["R", "S0", "S1", "P"]
OTHERS = ["S0@1 S0@0", "S1@1 S1@0", "SS0/2 S0", "SS0/3 S1", "S0 SS0/2", "R SS1/3", "P(avg) S0", "P(max) P(max)",
          "S1 P(min)", "P(product) R", "P(avg) P", "P(max) P(min)", "R P(avg)", "P(min) S0", "P(product) P(product)"]  # fmt: skip


def everything():
    return [" ".join(pair) for pair in product(WORDS, WORDS)]


def makes_mixed(src, dst):
    """It would make partial values beside others of another reduction, which a partition does not."""
    kinds = {"sum" if r == "avg" else r for r in dst.partial if r}
    return len(kinds) > 1 and any(r and src.partial[axis] != r for axis, r in enumerate(dst.partial))


def recombined(layout, parts, axis_sizes):
    """What all ranks' parts stand for, part by part of the ranks that differ on the partial axes alone."""
    return [fold(parts, layout, layout.coordinate(rank)) for rank in range(len(parts))]


def moved(rank, world_size, axis_sizes, shape, pairs, planned, dtype=torch.float32):
    """The number of pairs tried; raises at the first that is wrong."""
    mesh = init_device_mesh("cpu", axis_sizes)
    groups = groups_of(mesh)
    count = 0
    for source, target in pairs:
        src, dst = Layout.parse(source, axis_sizes, shape), Layout.parse(target, axis_sizes, shape)
        if makes_mixed(src, dst):
            continue
        x = before(src, rank, dtype)
        kept = x.clone()
        how = plan(src, dst, dtype="fp32") if planned else direct(src, dst)
        y = execute(how, x, groups)
        assert torch.equal(x, kept), f"{source} → {target}: the source was changed"
        check(y, src, dst, rank, dtype, f"{source} → {target}, {how.steps}")
        count += 1
    return count


def check(y, src, dst, rank, dtype, words):
    want = part(value(src, dtype), dst, rank)
    if dst.partial_axes():
        parts = [None] * src.num_ranks()
        dist.all_gather_object(parts, y)
        y = fold(parts, dst, dst.coordinate(rank)).to(dtype)
    assert y.shape == want.shape, f"{words}: {y.shape}, not {want.shape}"
    assert y.dtype == want.dtype
    assert torch.equal(y, want), f"{words}: {y} is not {want}"


@pytest.mark.parametrize("shape", [(4, 6), (5, 3)])
@pytest.mark.parametrize("planned", [False, True], ids=["direct", "planned"])
def test_all_pairs_on_two_axes(gang, shape, planned):
    pairs = list(product(everything(), everything()))
    others = [pair for word in OTHERS for pair in ((word, "S1 S0"), ("S1 S0", word), (word, "R R"), ("R R", word))]
    pairs = pairs if planned else pairs[:: 3 if shape == (4, 6) else 5]
    counts = gang(4).run(moved, (2, 2), shape, pairs + others, planned)
    assert counts[0] > len(pairs)
