"""Values that become partial beside partial values of any other reduction, on all ranks in this process."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.plan import plan
from meshwright.reshard.planner.steps import Step, StepKind
from meshwright.reshard.run.execute import execute
from tests.reshard.moves import before, fold, part, plan_of, value

REDUCTIONS = ("P", "P(avg)", "P(max)", "P(min)", "P(product)")
SHAPE = (3, 2)


def layouts(axis_sizes, words):
    return [Layout.parse(" ".join(chosen), axis_sizes, SHAPE) for chosen in product(words, repeat=len(axis_sizes))]


def is_set(src, dst):
    """Copies, and perhaps parts, become partial; what is partial stays so."""
    kept = all(r is None or r == dst.partial[axis] for axis, r in enumerate(src.partial))
    return (
        kept
        and dst.partial != src.partial
        and all(
            split in dst.splits[dim] or dst.partial[split.axis]
            for dim, splits in enumerate(src.splits)
            for split in splits
        )
    )


def check(src, dst, how, dtype=torch.float64):
    """Every rank's share, folded, is the value."""
    parts = [execute(how, before(src, rank, dtype), SimpleNamespace(rank=rank)) for rank in range(src.num_ranks())]
    whole = value(src, dtype)
    for rank in range(src.num_ranks()):
        found = fold(parts, dst, dst.coordinate(rank))
        assert torch.equal(found.to(dtype), part(whole, dst, rank)), f"{src} → {dst}, rank {rank}"


@pytest.mark.slow
def test_plans_make_any_reductions_beside_any_others():
    """Those that reduce nothing first, for want of ranks to do it on."""
    count = 0
    for axis_sizes, every in (((2, 3), 1), ((2, 2, 2), 11)):
        sources, targets = layouts(axis_sizes, ("R", "P", "P(product)", "P(max)")), layouts(axis_sizes, REDUCTIONS)
        for src, dst in [pair for pair in product(sources, targets) if is_set(*pair)][::every]:
            how = plan(src, dst)
            if {one.kind for one in how.steps} == {StepKind.PARTITION}:
                check(src, dst, how)
                count += 1
    assert count > 60


def step(source, target, axis_sizes):
    src, dst = (Layout.parse(text, axis_sizes, SHAPE) for text in (source, target))
    return src, dst, plan_of(Step(StepKind.PARTITION, (), src, dst, 0, 0, 0.0, 0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("inner", REDUCTIONS)
def test_parts_become_partial_too(reduction, inner):
    for source, target in (
        (f"S0 {inner}", f"{reduction} {inner}"),
        (f"{inner} S0", f"{inner} {reduction}"),
        (f"S0 {inner} {inner}", f"{reduction} {inner} {inner}"),
        (f"R {inner} S1", f"R {inner} {reduction}"),
    ):
        src, dst, how = step(source, target, (2,) * len(source.split()))
        check(src, dst, how)


@pytest.mark.parametrize(("source", "target", "said"), [
    ("R R", "P P(max)", "cannot become partial for max and sum at once"),
    ("S0 P R", "P(product) P P(product)", "cannot become partial for product and sum at once"),
])  # fmt: skip
def test_what_one_step_cannot_make_is_refused_and_planned_in_several(source, target, said):
    src, dst, how = step(source, target, (2,) * len(source.split()))
    with pytest.raises(LayoutError, match=said) as caught:
        execute(how, before(src, 0, torch.float64), SimpleNamespace(rank=0))
    assert "plan() makes such steps" in caught.value.fix
    assert len(plan(src, dst).steps) > 1


def test_whole_numbers_stay_in_their_range():
    src, dst, how = step("R P", "P(max) P", (2, 2))
    check(src, dst, how, torch.int8)
