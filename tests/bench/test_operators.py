"""Tests of `bench operators`: with the fallback, every operator is right, except a known list of rejected ones."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.distributed.device_mesh import init_device_mesh

from meshwright_bench.operators.benchmark import operator_figures, read_cases, run_side, time_figures
from meshwright_bench.operators.cases import Case, InputPlacement, Outcome, Side, begin_line, end_line

REFUSED = {
    "cauchy", "exponential", "geometric", "log_normal", "nn.functional.rrelu", "normal", "multinomial",
    "resize_", "resize_as_",
}  # fmt: skip
"""Operators that are not functions of their inputs: random numbers per rank, or storage."""


FORWARD = (InputPlacement.SHARD, InputPlacement.REPLICATED)


WRITES_PLAIN_TENSORS = {"nn.functional.linear_cross_entropy.chunked_none"}
"""Operators whose backward multiplies DTensors into plain memory of its own: the same error on all ranks."""


def swept(rank, world_size):
    """Return the outcomes of all operators on this rank, in one process group."""
    from meshwright_bench.operators.sweep import find_sample, name_of, operators, run_case

    mesh, cases = init_device_mesh("cpu", (world_size,)), []
    for entry in operators():
        sample = find_sample(entry)
        cases += [Case(name_of(entry), at, *run_case(sample, at, Side.FALLBACK, mesh)) for at in FORWARD]
    return cases


@pytest.mark.slow
def test_every_operator_is_right_or_rejected(gang):
    pytest.importorskip("expecttest", reason="PyTorch's samples need expecttest: pip install expecttest")
    for cases in gang(2).run(swept, timeout_s=240.0):
        bad = {Outcome.WRONG, Outcome.NOT_IMPLEMENTED, Outcome.OTHER_ERROR}
        assert [case for case in cases if case.outcome in bad] == []
        for placed in FORWARD:
            assert {c.operator for c in cases if c.placed is placed and c.outcome is Outcome.REFUSED} == REFUSED
            counts = Counter(case.outcome for case in cases if case.placed is placed)
            assert counts[Outcome.RIGHT] > 640 and counts[Outcome.UNDEFINED] < 25 and counts[Outcome.LEFT_OUT] < 40


@pytest.mark.slow
def test_the_backward_of_every_operator_is_right_or_rejected_on_all_ranks():
    """In ranks of their own, since an operator that is wrong may kill them. Most samples have 5 rows: 2, 2, 1, 0."""
    pytest.importorskip("expecttest", reason="PyTorch's samples need expecttest: pip install expecttest")
    options = {"gradients": True, "placements": (InputPlacement.SHARD,), "timeout_s": 60.0}  # for a loaded machine
    cases = run_side(Side.FALLBACK, num_ranks=4, **options)
    bad = [case for case in cases if case.outcome in (Outcome.WRONG, Outcome.NOT_IMPLEMENTED, Outcome.OTHER_ERROR)]
    assert {case.operator for case in bad} == WRITES_PLAIN_TENSORS
    assert all("mixes DTensors and a plain tensor" in case.note and "rank 0:" not in case.note for case in bad)
    assert {case.operator for case in cases if case.outcome is Outcome.REFUSED} <= REFUSED
    counts = Counter(case.outcome for case in cases)
    assert counts[Outcome.RIGHT] > 510, counts


def test_a_case_that_killed_its_ranks_is_recorded_as_an_error(tmp_path):
    lines = tmp_path / "lines"
    begin_line(lines, "add", InputPlacement.SHARD)
    end_line(lines, Outcome.RIGHT, "")
    begin_line(lines, "squeeze_copy", InputPlacement.SHARD)
    assert [case.operator for case in read_cases(lines)] == ["add"]
    end_line(lines, Outcome.OTHER_ERROR, "a rank died:\tof\nthis")
    assert read_cases(lines)[1] == Case(
        "squeeze_copy", InputPlacement.SHARD, Outcome.OTHER_ERROR, "a rank died:\tof\nthis"
    )


def test_figures_count_outcomes_with_targets_for_the_fallback_only():
    cases = [Case("a", InputPlacement.SHARD, Outcome.WRONG), Case("b", InputPlacement.SHARD, Outcome.RIGHT)]
    for side, is_met in ((Side.DTENSOR, None), (Side.FALLBACK, False)):
        figures = {figure.name: figure for figure in operator_figures(side, cases)}
        assert figures[f"{side}.shard0.right"].value == 1 and figures[f"{side}.shard0.wrong"].is_met is is_met
        assert figures[f"{side}.replicate.right"].value == 0


def test_times_are_relative_to_outside_with_targets_for_the_step():
    sides = {"outside": [0.1, 0.2, 0.1], "for_dtensor": [0.1, 0.22, 0.104], "fallback": [0.11, 0.2, 0.12]}
    figures = {figure.name: figure for figure in time_figures({"step.wall": sides, "mm": sides})}
    assert figures["step.wall.outside_ms"].value == 100 and figures["mm.outside_us"].value == pytest.approx(1e5)
    assert figures["step.wall.for_dtensor"].value == pytest.approx(1.04)
    assert figures["step.wall.for_dtensor"].is_met is False and figures["mm.for_dtensor"].is_met is None
    assert figures["step.wall.fallback"].value == pytest.approx(1.1)
