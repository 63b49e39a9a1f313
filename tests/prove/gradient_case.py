"""A faultless layout whose gradients a test damages, and what the proof says of them then."""

from __future__ import annotations

import pytest

from meshwright.mesh.axes import Axes
from meshwright.prove.compare.conclude import compare
from tests.prove.synthetic import SHAPES, hold, make_layout, make_reference

EVERY = list(SHAPES)
MATRIX = "blocks.0.attn.q.weight"

HSDP = Axes(dp_replicate=2, dp_shard=2)
FSDP = Axes(dp_shard=4)
FSDP_TP = Axes(dp_shard=2, tp=2)
ODD = Axes(dp_shard=3, tp=2)
ALL = Axes(dp_replicate=2, dp_shard=2, tp=2)
LAYOUTS = [HSDP, FSDP, FSDP_TP, ODD, ALL]
WITH_MICRO = [*((axes, 2) for axes in LAYOUTS), pytest.param(FSDP_TP, 1, marks=pytest.mark.slow)]
"""Layouts with their number of micro-batches."""


class Case:
    """A faultless layout with what a test needs to damage it, and what the proof says then."""

    def __init__(self, axes, microbatches=1):
        self.axes = axes
        self.reference = make_reference(axes.data_parallel(), microbatches)
        self.layout = make_layout(self.reference, axes)

    def give(self, full_of, names=EVERY):
        """Let each rank hold its piece of `full_of(rank, parts)`, for every parameter."""
        for name in names:
            parts = self.reference.partial_gradients[name]
            hold(self.layout.gradients, self.axes, name, lambda rank, parts=parts: full_of(rank, parts))

    def share(self, rank):
        return self.axes.data_index(rank)

    def diagnoses(self, names=EVERY):
        """What the proof says of some gradients; all others must be right."""
        result = compare(self.layout, self.reference)
        assert not result.passed
        wrong = {p.name: p.gradient.diagnosis for p in result.parameters if not p.gradient.ok}
        assert sorted(wrong) == sorted(names)
        assert all(p.name in wrong or p.gradient.diagnosis is None for p in result.parameters)
        return list(wrong.values())

    def says(self, *words, kind=None, names=EVERY):
        for diagnosis in self.diagnoses(names):
            for word in words:
                assert word in diagnosis.text, diagnosis.text
            assert kind is None or diagnosis.kind is kind, diagnosis.text
