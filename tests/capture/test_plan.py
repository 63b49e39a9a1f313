"""Tests of capture plans: as few slots and buffers as can be, the published trials, the order of the table."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.capture.lifetimes import GRADIENTS, Role, color_groups, color_intervals, overlaps_itself
from meshwright.capture.plan import plan_capture
from meshwright.capture.signature import LayerSignature, TensorSignature
from meshwright.capture.verify import verify_capture
from meshwright.errors import InputError, ScheduleError
from meshwright.pipeline import Action, ActionKind, Schedule, generate, lower
from meshwright.pipeline.generate import ScheduleKind
from tests.capture.plans import LAYER, STREAM, WIDE, plan, random_layers, table
from tests.pipeline.random_tables import random_table

K = ActionKind
intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: tuple(sorted(pair))), max_size=25
)


def largest_overlap(groups):
    """Return the largest number of groups that are in use at one time: the largest clique, if each is one interval."""
    changes = sorted(
        change for group in groups for begin, end in group for change in ((begin, 0, 1), (end, 1, -1))
    )  # a beginning counts before an end at the same time
    live = most = 0
    for _, _, change in changes:
        live += change
        most = max(most, live)
    return most


def most_in_flight(schedule, rank, stage):
    """The most micro-batches of a stage between their first action and their last, position by position."""
    spans = {}
    for position, action in enumerate(schedule.compute_only().actions[rank]):
        for part in action.parts():
            if part.stage == stage:
                spans.setdefault(part.microbatch, []).append(position)
    return max(
        sum(min(own) <= position <= max(own) for own in spans.values()) for own in spans.values() for position in own
    )


@given(st.randoms(use_true_random=False), st.sampled_from(["slot", "per_microbatch"]))
@settings(max_examples=60, deadline=None)
def test_any_order_has_as_few_slots_as_micro_batches_in_flight(random: Random, mode):
    schedule = lower(random_table(random))
    rank = random.randrange(schedule.num_ranks)
    signatures = [random_layers(random) for _ in schedule.stages_of(rank)]
    made = plan_capture(
        schedule, rank=rank, layers_per_chunk=[len(own) for own in signatures], signatures=signatures, mode=mode
    )
    verify_capture(made)
    for stage in schedule.stages_of(rank):
        assert made.num_slots(stage) == most_in_flight(schedule, rank, stage)


@given(st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_reuse_saves_memory_and_nothing_else(random: Random):
    schedule = lower(random_table(random))
    rank = random.randrange(schedule.num_ranks)
    signatures = [random_layers(random) for _ in schedule.stages_of(rank)]
    options = {"rank": rank, "layers_per_chunk": [len(own) for own in signatures], "signatures": signatures}
    reused = plan_capture(schedule, **options)
    for reuse_io, reuse_gradients in ((False, True), (True, False), (False, False)):
        other = plan_capture(schedule, **options, reuse_io=reuse_io, reuse_grad_outputs=reuse_gradients)
        verify_capture(other)
        assert other.buffer_bytes >= reused.buffer_bytes and other.graphs == reused.graphs
        alone = [one.buffer for one in other.tensors if not (reuse_gradients if one.role in GRADIENTS else reuse_io)]
        others = [one.buffer for one in other.tensors if (reuse_gradients if one.role in GRADIENTS else reuse_io)]
        assert len(set(alone)) == len(alone) and not set(alone) & set(others)


@given(intervals)
def test_intervals_take_as_many_numbers_as_overlap_at_once(found):
    colors = color_intervals(found)
    overlap = max((sum(a <= time <= b for a, b in found) for time in range(31)), default=0)
    assert len(set(colors)) == overlap == largest_overlap([[one] for one in found])
    for i, (begin, end) in enumerate(found):
        for j, (other_begin, other_end) in enumerate(found[:i]):
            assert colors[i] != colors[j] or end < other_begin or other_end < begin


@given(intervals, st.randoms(use_true_random=False))
def test_groups_of_intervals_never_share_a_number_where_they_overlap(found, random):
    """Grouped at random, without groups that overlap themselves; groups of one take as few as single intervals."""
    groups = []
    for one in found:
        fitting = [group for group in groups if not overlaps_itself([*group, one])]
        random.choice(fitting).append(one) if fitting and random.random() < 0.5 else groups.append([one])
    colors = color_groups(groups)
    for color in set(colors):
        assert not overlaps_itself(
            [one for group, own in zip(groups, colors, strict=True) if own == color for one in group]
        )
    assert len(set(color_groups([[one] for one in found]))) == largest_overlap([[one] for one in found])


@pytest.mark.parametrize(
    "kind, ranks, microbatches, chunks, layers, each, in_slots",
    [("1f1b", 4, 32, 1, 8, 512, 64), ("interleaved", 8, 64, 2, (4, 3), 896, 176)],
)
def test_published_numbers_of_graphs(kind, ranks, microbatches, chunks, layers, each, in_slots):
    options = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks, "layers": layers}
    assert len(plan(kind, **options, mode="per_microbatch").graphs) == each
    assert len(plan(kind, **options).graphs) == in_slots


@pytest.mark.parametrize("mode", ["slot", "per_microbatch"])
@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_generated_tables(kind, mode):
    schedule = table(kind, ranks=3, microbatches=7 if kind is not ScheduleKind.INTERLEAVED else 6)
    for rank in range(3):
        stages = schedule.stages_of(rank)
        layers = tuple(range(3, 3 - len(stages), -1))
        made = plan_capture(schedule, rank=rank, layers_per_chunk=layers, signatures=LAYER, mode=mode)
        verify_capture(made)
        for stage in stages:
            assert made.num_slots(stage) == most_in_flight(schedule, rank, stage)
        assert made.num_pools == (sum(map(made.num_slots, stages)) if mode == "slot" else 1)


@pytest.mark.parametrize("mode", ["slot", "per_microbatch"])
def test_graphs_are_captured_in_the_order_of_the_table(mode):
    made = plan("zb-v", ranks=2, microbatches=4, mode=mode)
    order = iter(event for event in made.events if event.layer is not None)
    for graph in made.graphs:
        assert any((event.kind, event.stage, event.layer) == (graph.kind, graph.stage, graph.layer) for event in order)


def test_a_micro_batch_holds_its_slot_until_its_weight_gradients():
    """The order 1, -1, 1, -1.5 of TransformerEngine's tables: the input of the first micro-batch is read by its W after
    the second one's F, so a slot reused after the input's gradient is read too late."""
    kinds = [(K.FORWARD, 0), (K.BACKWARD_INPUT, 0), (K.FORWARD, 1), (K.BACKWARD_WEIGHT, 0), (K.BACKWARD_INPUT, 1),
             (K.BACKWARD_WEIGHT, 1)]  # fmt: skip
    schedule = Schedule("by hand", 2, (0,), (tuple(Action(kind, 0, m) for kind, m in kinds),))
    made = plan_capture(schedule, layers_per_chunk=1, signatures=LAYER)
    verify_capture(made)
    assert made.num_slots(0) == 2
    whole = lower(generate("1f1b", num_stages=1, num_microbatches=2))
    assert plan_capture(whole, layers_per_chunk=1, signatures=LAYER).num_slots(0) == 1


def test_uneven_chunks_have_slots_of_their_own():
    """Chunks of 3 and 1 layers in Megatron's interleaved order."""
    made = plan("interleaved", ranks=2, microbatches=4, chunks=2, layers=(3, 1))
    verify_capture(made)
    assert [len(layers) for _, layers in made.chunks] == [3, 1]
    assert len(made.graphs) == 2 * (3 * made.num_slots(0) + made.num_slots(2))


def test_the_gradient_that_leaves_a_chunk_is_copied_where_its_slot_is_needed_again():
    """The last rank of 1F1B has one slot, and its next backward comes before the gradient has been sent."""
    last = plan(ranks=2, rank=1)
    assert last.num_slots(1) == 1
    copies = [one for one in last.tensors if one.role is Role.HANDED_BACK]
    assert [one.instance for one in copies] == list(range(8)) and len({one.buffer for one in copies}) == 2
    first = plan(ranks=2, rank=0)
    assert {one.role for one in first.tensors} == {Role.INPUT, Role.OUTPUT, Role.OUTPUT_GRADIENT, Role.INPUT_GRADIENT}


def test_layers_that_follow_each_other_share_a_tensor():
    followed = plan(ranks=1, microbatches=2, layers=3)
    inputs = [one for one in followed.tensors if one.role is Role.INPUT]
    assert [one.layer for one in inputs] == [0]
    between = LayerSignature(STREAM, STREAM, follows=False)
    apart = plan(ranks=1, microbatches=2, layers=3, signatures=between)
    assert [one.layer for one in apart.tensors if one.role is Role.INPUT] == [0, 1, 2]
    narrow, wide = LayerSignature(STREAM, WIDE), LayerSignature(STREAM, STREAM)
    other = plan(ranks=1, microbatches=2, layers=2, signatures=[(narrow, wide)])
    assert [one.layer for one in other.tensors if one.role is Role.INPUT] == [0, 1]


def test_bytes_by_hand():
    """Two micro-batches in flight in two slots, two layers that save 1000 bytes each and need 100 for a while."""
    made = plan(ranks=2, microbatches=4)
    assert made.num_slots(0) == 2 and made.pool_bytes() == {0: 2100, 1: 2100}
    assert made.peak_bytes == made.buffer_bytes + 4200
    shared = plan(ranks=2, microbatches=4, mode="per_microbatch")
    assert shared.pool_bytes() == {0: 4100}
    assert made.buffer_bytes == len(made.buffers) * 2 * 8 * 4 * 2


def test_a_plan_is_json_and_its_fingerprint_tells_plans_apart():
    made = plan()
    assert json.loads(made.to_json())["graphs"][0]["kind"] == "F"
    assert made.fingerprint() == plan().fingerprint()
    assert made.fingerprint() not in {plan(rank=1).fingerprint(), plan(layers=1).fingerprint()}


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"rank": 4}, ScheduleError, "rank 4 of a table with 4 rows"),
        ({"layers": (1, 2)}, InputError, "for a rank with 1 stage"),
        ({"layers": -1}, InputError, "at least 0"),
        ({"layers": 2, "signatures": [(LAYER,)]}, InputError, r"signatures for \[1\] layers"),
        ({"mode": "slots"}, InputError, "slots is not a mode"),
    ],
)
def test_bad_input_is_named(change, error, words):
    with pytest.raises(error, match=words):
        plan(**change)


def test_a_table_must_be_lowered():
    with pytest.raises(ScheduleError, match="not lowered"):
        plan_capture(generate("1f1b", num_stages=2, num_microbatches=2), layers_per_chunk=1, signatures=LAYER)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="float7"):
        TensorSignature((1,), "float7")
