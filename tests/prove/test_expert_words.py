"""What a proof says of experts' gradients, counts and biases, from numbers alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.mesh.axes import Axes
from meshwright.prove.explain.experts import balancing_step, diagnose_bias, diagnose_counts, narrow_to_experts
from meshwright.prove.explain.gradients import unrecognised
from meshwright.prove.judge.tensors import LayoutCounts
from meshwright.prove.judge.verdicts import compare_tensors
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.record.evidence import RecordedShard

NAME, NUM_EXPERTS, EP, RATE = "experts.up", 8, 2, 0.01
AXES = Axes(dp_shard=4)
COUNTS = LayoutCounts(AXES, 2, 16)
PLACEMENT = ExpertPlacement(frozenset({NAME}), NUM_EXPERTS, EP, 2)
LOCAL = NUM_EXPERTS // EP


def verdict_on(held, expected, contributions=None):
    """The verdict on a tensor of which each rank holds `held(rank)`: an offset and values."""
    shards = [RecordedShard(rank, held(rank)[0], torch.from_numpy(held(rank)[1])) for rank in range(4)]
    parts = lambda _: contributions  # noqa: E731
    verdict = compare_tensors({NAME: shards}, {NAME: expected}, COUNTS, 1e-12, contributions=parts)[NAME]
    return verdict.with_diagnosis(unrecognised(verdict.suspect))


def suspect_of(held, expected):
    return verdict_on(held, expected).suspect


def gradient_words(full_of):
    """What is said of experts' gradients of which rank r holds its experts' part of `full_of(r, contributions)`."""
    contributions = np.random.default_rng(0).normal(size=(4, 2, NUM_EXPERTS, 6, 4))

    def held(rank):
        # Experts by position in the group, rows of them by group.
        first, row = rank % EP * LOCAL, rank // EP * 3
        return (first, row, 0), full_of(rank, contributions)[first : first + LOCAL, row : row + 3].copy()

    verdict = verdict_on(held, contributions.sum((0, 1)), contributions)
    return narrow_to_experts({NAME: verdict}, PLACEMENT)[NAME].result.diagnosis.text


def with_experts(change):
    def full_of(rank, contributions):
        full = contributions.sum((0, 1))
        return change(full)

    return full_of


def own_group(rank, parts):
    return parts[rank // EP * EP :][:EP].sum((0, 1))


def scaled(full, experts, factor):
    full[experts] *= factor
    return full


@pytest.mark.parametrize(
    ("full_of", "words"),
    [
        (with_experts(lambda full: 2.0 * full), "multiplied by ep (2)"),
        (with_experts(lambda full: 0.5 * full), "averaged over ep (2 ranks)"),
        (lambda rank, parts: own_group(rank, parts), "the sum over the ranks that hold the same experts"),
        (lambda rank, parts: 2 * own_group(rank, parts), "the mean over the ranks that hold the same experts"),
        (lambda rank, parts: parts[rank].sum(0), "tokens of other ep ranks are missing"),
        (with_experts(lambda full: scaled(full, [5], 0.0)), "zero for expert 5 (ep rank 1)"),
        (with_experts(lambda full: scaled(full, [4, 5, 6, 7], 3.0)), "3.000 × the reference for experts 4…7"),
        (with_experts(lambda full: full[[1, 0, *range(2, 8)]]), "experts 0, 1 (ep rank 0) have other experts"),
        (with_experts(lambda full: np.roll(full, 4, 0)), "experts are exchanged"),
        (with_experts(lambda full: full + 1e-3), "not recognised"),
        (with_experts(lambda full: 1.37 * full), "not recognised"),
    ],
)  # fmt: skip
def test_gradients_of_experts(full_of, words):
    assert words in gradient_words(full_of)


def test_if_other_gradients_are_wrong_too_experts_are_not_blamed():
    contributions = np.ones((4, 2, NUM_EXPERTS, 6, 4))
    due = contributions.sum((0, 1))
    verdict = verdict_on(lambda rank: ((0, 0, 0), 2.0 * due), due, contributions)
    verdicts = {NAME: verdict, "norm": verdict}
    assert narrow_to_experts(verdicts, PLACEMENT) == verdicts


PARTS = np.random.default_rng(1).integers(0, 40, size=(4, 2, NUM_EXPERTS)).astype(float)


@pytest.mark.parametrize(
    ("held", "recomputes", "words"),
    [
        (lambda rank: 2 * PARTS.sum((0, 1)), True, "recomputed forwards count their tokens again"),
        (lambda rank: 2 * PARTS.sum((0, 1)), False, "counts are added twice in a step"),
        (lambda rank: 4 * PARTS.sum((0, 1)), False, "summed once more over dp_shard (4 ranks)"),
        (lambda rank: PARTS[:, 1].sum(0), False, "replace those of the one before it"),
        (lambda rank: PARTS[:, 0].sum(0), False, "counts of the other micro-batches are missing"),
        (lambda rank: PARTS[rank].sum(0), False, "not summed over the data-parallel ranks"),
        (lambda rank: PARTS[rank, 1], False, "only the last micro-batch (1) of each rank's own tokens"),
        (lambda rank: PARTS[[0, 1, 3]].sum((0, 1)), False, "counts of data-parallel rank 2 are missing"),
        (lambda rank: PARTS.sum((0, 1)) + 1.0, False, ""),
    ],
)
def test_counts(held, recomputes, words):
    suspect = suspect_of(lambda rank: ((0,), held(rank)), PARTS.sum((0, 1)))
    found = diagnose_counts(suspect, PARTS, replace(PLACEMENT, recomputes=recomputes))
    assert (words in found.text and recomputes == ("recomputed" in found.text)) if words else found is None


DUE = balancing_step(PARTS.sum((0, 1)), RATE)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (lambda rank: -DUE, "the sign is flipped"),
        (lambda rank: 0 * DUE, "the bias is not updated"),
        (lambda rank: 2 * DUE, "updated 2 times a step"),
        (lambda rank: sum(balancing_step(PARTS[:, m].sum(0), RATE) for m in range(2)), "once per micro-batch"),
        (lambda rank: balancing_step(PARTS[rank].sum(0), RATE), "follows each rank's own counts"),
        (lambda rank: DUE + 1e-4, ""),
    ],
)
def test_biases(held, words):
    suspect = suspect_of(lambda rank: ((0,), held(rank)), DUE)
    right = {rank: PARTS.sum((0, 1)) for rank in range(4)}
    found = diagnose_bias(suspect, right, PARTS, RATE, PARTS.sum((0, 1)))
    assert words in found.text if words else found is None


def test_a_bias_may_follow_from_wrong_counts():
    wrong = PARTS[0].sum(0)
    suspect = suspect_of(lambda rank: ((0,), balancing_step(wrong, RATE)), DUE)
    found = diagnose_bias(suspect, dict.fromkeys(range(4), wrong), PARTS, RATE, PARTS.sum((0, 1)))
    assert "follows from wrong counts" in found.text
