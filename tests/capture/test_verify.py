"""Seeded faults of capture plans: `verify_capture` finds each, and says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from meshwright.capture import lifetimes as lifetimes_module
from meshwright.capture import plan as plan_module
from meshwright.capture.lifetimes import Lifetimes, Role
from meshwright.capture.plan import plan_capture
from meshwright.capture.signature import LayerSignature
from meshwright.capture.verify import verify_capture
from meshwright.errors import CaptureError
from meshwright.pipeline import Action, ActionKind, Overlap, Schedule
from tests.capture.plans import LAYER, STREAM, WIDE, plan

K = ActionKind


def ignoring_weight_gradients(method):
    """The lifetimes of TransformerEngine's rule, which knows no W."""

    def without(self, *arguments):
        at, done = self._at, self._done
        self._at = {key: event for key, event in at.items() if key[0] is not K.BACKWARD_WEIGHT}
        self._done = {}
        for event in self._at.values():
            if event.kind in (K.FORWARD, K.BACKWARD, K.BACKWARD_INPUT):
                key = (event.stage, event.microbatch)
                self._done[key] = max(self._done.get(key, 0), event.end)
        try:
            found = method(self, *arguments)
            return found if isinstance(found, (dict, int)) else iter(list(found))
        finally:
            self._at, self._done = at, done

    return without


def slots_without_w():
    with (
        patch.object(Lifetimes, "microbatches", ignoring_weight_gradients(Lifetimes.microbatches)),
        patch.object(Lifetimes, "tensors", ignoring_weight_gradients(Lifetimes.tensors)),
    ):
        return plan("zb-h1", rank=1)


def tensors_without_w():
    with patch.object(Lifetimes, "tensors", ignoring_weight_gradients(Lifetimes.tensors)):
        return plan("zb-h1", rank=1, mode="per_microbatch")


def shorter(role, *, by, **changes):
    """A plan in which tensors of one role end earlier than they should."""
    tensors = Lifetimes.tensors

    def shortened(self):
        for one in tensors(self):
            begin, end = one.interval
            yield replace(one, interval=(begin, max(begin, end - by))) if one.role is role else one

    with patch.object(Lifetimes, "tensors", shortened):
        return plan(mode="per_microbatch", **changes)


def freed_before_it_is_sent(**options):
    """The send of a tensor isn't waited for."""
    tensors = Lifetimes.tensors
    with patch.object(Lifetimes, "tensors", lambda self: (replace(one, leaves=None) for one in tensors(self))):
        return plan(ranks=2, rank=1, **options)


def as_if_outputs_were_not_saved():
    made = plan(signatures=LayerSignature(STREAM, STREAM, saves_output=False), mode="per_microbatch")
    return replace(made, chunks=((0, (LAYER, LAYER)),))


def as_if_layers_followed():
    """Eager code between two layers keeps the output of the first one for its backward."""
    made = plan(signatures=LayerSignature(STREAM, STREAM, follows=True), mode="per_microbatch", layers=3)
    apart = LayerSignature(STREAM, STREAM, follows=False)
    return replace(made, chunks=((0, (apart,) * 3),))


def one_shared_pool():
    made = plan()
    return replace(made, graphs=tuple(replace(graph, pool=0) for graph in made.graphs))


def pools_of_two_stages():
    made = plan("zb-v", ranks=2)
    return replace(made, graphs=tuple(replace(graph, pool=graph.instance) for graph in made.graphs))


def with_graphs(edit):
    made = plan()
    return replace(made, graphs=tuple(edit(list(made.graphs))))


def with_slots(edit):
    made = plan()
    return replace(made, slots=tuple((stage, tuple(edit(list(slots)))) for stage, slots in made.slots))


def swapped(items, first, second):
    items[first], items[second] = items[second], items[first]
    return items


def other_shape():
    made = plan(signatures=[(LayerSignature(STREAM, WIDE), LayerSignature(WIDE, STREAM))])
    narrow = made.buffers.index(STREAM)
    wide = made.buffers.index(WIDE)
    return replace(
        made, tensors=tuple(replace(one, buffer=narrow) if one.buffer == wide else one for one in made.tensors)
    )


def in_place():
    """A backward that writes the gradient of its input over that of its output."""
    made = plan(mode="per_microbatch")
    at = {(one.role, one.layer, one.instance): one.buffer for one in made.tensors}
    return replace(
        made,
        tensors=tuple(
            replace(one, buffer=at[Role.OUTPUT_GRADIENT, 1, one.instance])
            if one.role is Role.INPUT_GRADIENT and one.layer == 1
            else one
            for one in made.tensors
        ),
    )


def without_memory():
    made = plan()
    return replace(made, tensors=tuple(one for one in made.tensors if one.role is not Role.OUTPUT_GRADIENT))


def overlaps_as_if_in_order():
    """The two computations of an overlapped pair placed as if the first ended before the second began."""
    row_events = plan_module.row_events
    pair = Overlap(Action(K.BACKWARD, 0, 0), Action(K.FORWARD, 0, 1))
    schedule = Schedule("by hand", 2, (0,), ((Action(K.FORWARD, 0, 0), pair, Action(K.BACKWARD, 0, 1)),))
    options = {"layers_per_chunk": 2, "signatures": LAYER}
    right = plan_capture(schedule, **options)
    verify_capture(right)
    with patch.object(
        plan_module, "row_events", lambda *a: tuple(replace(e, begin=i, end=i) for i, e in enumerate(row_events(*a)))
    ):
        wrong = plan_capture(schedule, **options)
    return replace(wrong, events=right.events)


FAULTS = {
    "slots freed before weight gradients": (slots_without_w, "isn't done"),
    "tensors freed before weight gradients": (tensors_without_w, "has overwritten it"),
    "an input freed one event early": (lambda: shorter(Role.INPUT, by=1), "reads the input of layer 0"),
    "an output freed before the backward of the next layer": (
        lambda: shorter(Role.OUTPUT, by=3, signatures=LayerSignature(STREAM, STREAM, saves_output=False), layers=3),
        "reads the output of layer",
    ),
    "a sent gradient freed one backward early, two layers a chunk": (
        lambda: freed_before_it_is_sent(mode="per_microbatch"),
        "reads the gradient of the input of layer 0",
    ),
    "the gradient of the output freed before W": (
        lambda: shorter(Role.OUTPUT_GRADIENT, by=99, kind="zb-h1", rank=1),
        "reads the gradient of the output of layer",
    ),
    "a gradient overwritten while it is sent": (freed_before_it_is_sent, "1(SEND_B|FREE_IN_GRAD)"),
    "an output the backward reads, freed before": (as_if_outputs_were_not_saved, "reads the output of layer"),
    "eager code between layers that follow": (as_if_layers_followed, "has no memory"),
    "one pool for all slots": (one_shared_pool, "shares memory pool 0"),
    "slots of two stages in one pool": (pools_of_two_stages, "shares memory pool"),
    "a graph missing": (lambda: with_graphs(lambda graphs: graphs[:-1]), "is missing"),
    "graphs out of order": (lambda: with_graphs(lambda graphs: swapped(graphs, 0, 1)), "captured in the order"),
    "a graph twice": (lambda: with_graphs(lambda graphs: [*graphs, graphs[0]]), "nothing replays"),
    "a micro-batch in another one's slot": (
        lambda: with_slots(lambda slots: [*slots[:5], slots[4], *slots[6:]]),
        "isn't done",
    ),
    "memory of another shape": (other_shape, "2×8×4 bfloat16 on cuda"),
    "a gradient written in place": (in_place, "reads the gradient of the output"),
    "a tensor without memory": (without_memory, "has no memory"),
    "an overlapped pair that shares memory": (overlaps_as_if_in_order, "at the same time"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault):
    build, words = FAULTS[fault]
    with pytest.raises(CaptureError, match=words):
        verify_capture(build())


def test_the_plans_without_faults_pass():
    for options in ({}, {"mode": "per_microbatch"}, {"kind": "zb-h1", "rank": 1}, {"kind": "dualpipe-v", "ranks": 2}):
        verify_capture(plan(**options))


def test_lifetimes_are_not_what_is_checked():
    """The checker doesn't use the planner's lifetimes, or both would share a mistake."""
    with patch.object(lifetimes_module, "Lifetimes", None):
        verify_capture(plan())
