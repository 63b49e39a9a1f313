"""What can be wrong with a plan: an edit of a right one each, and what `verify` must say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.mesh.layout import Layout
from meshwright.reshard.planner.steps import ReshardPlan, StepKind
from tests.reshard.by_hand import plan_of

K = StepKind
MESH, SHAPE = (2, 4), (16, 24)

GATHER_SLICE_SWAP = plan_of(
    MESH, SHAPE, "S0 S1", ("all-gather", "1", "S0 R"), ("slice", "", "S0 S0"), ("permute", "0 1", "S0@1 S0@0")
)
EXCHANGE = plan_of(MESH, SHAPE, "S0 S1", ("all-to-all", "0 1", "S1 S0"))
MIXED = plan_of(MESH, SHAPE, "P(sum) P(max)", ("reduce-scatter", "1", "P(sum) S0"), ("reduce-scatter", "0", "S1 S0"))
REDUCE = plan_of(MESH, SHAPE, "P P", ("reduce-scatter", "1", "P S0"), ("all-reduce", "0", "R S0"))
MAKE = plan_of(MESH, SHAPE, "S0 R", ("partition", "", "P R"))
ROUNDS = plan_of(MESH, SHAPE, "S0 S1", ("all-to-all", "0 1", "S1 S0"), rounds=2)


def layout(text: str, shape: tuple[int, ...] = SHAPE, mesh: tuple[int, ...] = MESH) -> Layout:
    return Layout.parse(text, mesh, shape)


@dataclass(frozen=True)
class Fault:
    """A wrong plan: what was changed, and words of the error."""

    name: str
    plan: ReshardPlan
    says: str


def step(plan: ReshardPlan, number: int, **changes: Any) -> ReshardPlan:
    """The plan with one step (from 1) changed."""
    steps = list(plan.steps)
    steps[number - 1] = replace(steps[number - 1], **changes)
    return replace(plan, steps=tuple(steps))


def without(plan: ReshardPlan, number: int) -> ReshardPlan:
    return replace(plan, steps=(*plan.steps[: number - 1], *plan.steps[number:]))


def more(plan: ReshardPlan, **amounts: int) -> ReshardPlan:
    """The plan with these figures of its own larger by so much."""
    return replace(plan, **{name: getattr(plan, name) + amount for name, amount in amounts.items()})


def hand(src: str, *steps: tuple[str, str, str]) -> Callable[[], ReshardPlan]:
    """A plan that is counted as it says, whatever it does."""
    return lambda: plan_of(MESH, SHAPE, src, *steps)


S = GATHER_SLICE_SWAP.steps
FAULTS = [
    Fault("a step is lost", without(GATHER_SLICE_SWAP, 2), "step 2 (permute) begins with S0 S0"),
    Fault("the last step is lost", without(GATHER_SLICE_SWAP, 3), "the plan ends with S0 S0"),
    Fault("two steps are swapped", replace(GATHER_SLICE_SWAP, steps=(S[0], S[2], S[1])), "step 2 (permute) begins"),
    Fault("another source", replace(GATHER_SLICE_SWAP, src=layout("S1 S0")), "the plan's source is S1 S0"),
    Fault("another destination", replace(EXCHANGE, dst=layout("R S0")), "not its destination R S0"),
    Fault("another tensor", replace(EXCHANGE, dst=layout("S1 S0", (16, 8))), "two tensors or meshes"),
    Fault("another mesh", replace(EXCHANGE, dst=layout("S1 S0", mesh=(4, 2))), "two tensors or meshes"),
    Fault("too few axes", step(EXCHANGE, 1, axes=(0,)), "needs 48 elements for rank 0"),
    Fault("an axis of copies in the group", step(REDUCE, 2, axes=(0, 1), src=layout("P R")), "begins with P R"),
    Fault("axes that are not there", step(EXCHANGE, 1, axes=(0, 1, 2)), "a mesh with axes 0 to 1"),
    Fault("axes out of order", step(EXCHANGE, 1, axes=(1, 0)), "group over axes [1, 0]"),
    Fault("no axes", step(EXCHANGE, 1, axes=()), "group over axes []"),
    Fault("a slice with a group", step(GATHER_SLICE_SWAP, 2, axes=(1,)), "has a group over axes 1"),
    Fault("a gather that is called exchange", step(EXCHANGE, 1, kind=K.ALL_GATHER), "different shards"),
    Fault("an exchange that is called slice", step(EXCHANGE, 1, kind=K.SLICE, axes=()), "but itself has"),
    Fault("an exchange that is called permute", step(EXCHANGE, 1, kind=K.PERMUTE), "a part of the shard of rank"),
    Fault("an exchange that is called reduction", step(EXCHANGE, 1, kind=K.ALL_REDUCE), "has nothing to reduce"),
    Fault("an exchange called partition", step(EXCHANGE, 1, kind=K.PARTITION, axes=()), "makes nothing partial"),
    Fault("a scatter of nothing", step(REDUCE, 2, kind=K.REDUCE_SCATTER), "every rank of a group with its full shard"),
    Fault("scatters as all-reduce", step(REDUCE, 1, kind=K.ALL_REDUCE), "different shards"),
    Fault("reduces by an exchange", step(REDUCE, 1, kind=K.ALL_TO_ALL), "has axis 1, with unreduced partial"),
    Fault("a partition called slice", step(MAKE, 1, kind=K.SLICE), "makes values partial on axis 0"),
    Fault("sends less", step(EXCHANGE, 1, bytes_sent=S[0].bytes_sent - 2), "says that a rank sends"),
    Fault("receives less", step(EXCHANGE, 1, bytes_received=EXCHANGE.bytes_received - 2), "says that a rank receives"),
    Fault("receives more", step(EXCHANGE, 1, bytes_received=EXCHANGE.bytes_received + 2), "says that a rank receives"),
    Fault("holds less", step(EXCHANGE, 1, live_bytes=EXCHANGE.peak_bytes - 2), "says that a rank holds"),
    Fault("no rounds", step(EXCHANGE, 1, rounds=0), "over 0 collectives"),
    Fault("holds less, in rounds", step(ROUNDS, 1, live_bytes=ROUNDS.steps[0].live_bytes - 99), "a rank holds"),
    Fault("a negative time", step(EXCHANGE, 1, time_us=-1.0), "takes -1.0 µs"),
    Fault("a time that is none", step(EXCHANGE, 1, time_us=float("nan")), "takes nan µs"),
    Fault("totals: sent", more(EXCHANGE, bytes_sent=2), "the plan's bytes_sent is"),
    Fault("totals: received", more(EXCHANGE, bytes_received=-2), "the plan's bytes_received is"),
    Fault("totals: peak", more(EXCHANGE, peak_bytes=-2), "the plan's peak_bytes is"),
    Fault("totals: time", more(EXCHANGE, time_us=1), "the plan's time_us is"),
    Fault("a bound that is too low", more(EXCHANGE, lower_bound_bytes=-2), "the plan's lower_bound_bytes is"),
    Fault("a bound above what is received", more(EXCHANGE, lower_bound_bytes=2), "the plan's lower_bound_bytes is"),
]
"""Edits of right plans."""

MADE = [
    ("copies in the group", hand("S0 R", ("all-gather", "0 1", "R R")), "axis 1, with replicas, in its group"),
    ("a partial axis in the group", hand("S0 P", ("all-gather", "0 1", "R P")), "with unreduced partial values"),
    ("a slice of what is elsewhere", hand("S0 R", ("slice", "", "S0@1 S0@0")), "but itself has"),
    ("a permute of parts", hand("S0 S0", ("permute", "0 1", "S1 S0")), "a part of the shard of rank"),
    ("a permute to several", hand("S0 S1", ("permute", "0", "R S1")), "or more than that shard"),
    ("one part to two ranks", lambda: plan_of((2, 2), (8, 8), "S0 R", ("permute", "0", "R S0")), "to several ranks"),
    (
        "a gather that leaves out",
        hand("S0 R", ("all-gather", "0", "R S1")),
        "does not give rank 0 the full shard of rank",
    ),
    ("partial values are forgotten", hand("P S0", ("all-gather", "1", "R R")), "leaves axis 0 without its partial"),
    ("reduced outside the group", hand("P P", ("all-reduce", "1", "R R")), "of axis 0, whose ranks take no part"),
    ("another reduction", hand("P P", ("all-reduce", "1", "P(max) R")), "turns sum on axis 0 into max"),
    ("sums before the maxima", hand("P P(max)", ("all-reduce", "0", "R P(max)")), "the sum over axis 0 before the max"),
    ("maxima before the sums", hand("P(max) P(sum)", ("all-reduce", "0", "R P(sum)")), "the max over axis 0 before"),
    ("a sum inside a maximum", hand("R P", ("partition", "", "P(max) P")), "axis 0 partial (max) around the sum"),
    ("partial by an exchange", hand("S0 S1", ("all-to-all", "0 1", "S1 P")), "makes values partial on axis 1"),
    ("shares that are nobody's", hand("S0 S0", ("partition", "", "P S0")), "each element is kept by one rank"),
    ("an all-reduce of other parts", hand("P S0", ("all-reduce", "0 1", "R S1")), "different shards"),
]
"""Plans that are made wrong from the start, and counted as they are."""
