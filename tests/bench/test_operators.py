"""Tests of `bench operators`: with the fallback, every operator is right, except a known list of rejected ones."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright.mesh.process_groups import process_group
from meshwright_bench.operators.benchmark import operator_figures, read_cases, run_side, time_figures
from meshwright_bench.operators.cases import Case, InputPlacement, Outcome, Side, begin_line, end_line
from tests.bench.tiny import by_name
from tests.reshard.test_random_layouts import GROUPS

REFUSED = {
    "cauchy", "exponential", "geometric", "log_normal", "nn.functional.rrelu", "normal", "multinomial",
    "resize_", "resize_as_",
}  # fmt: skip
"""Operators that are not functions of their inputs: random numbers per rank, or storage."""

WRITES_PLAIN_TENSORS = {"nn.functional.linear_cross_entropy.chunked_none"}
"""Operators whose backward multiplies DTensors into plain memory of its own: the same error on all ranks."""


ALIKE = ("fft.", "linalg.", "masked.", "signal.", "native_batch_norm", "_native_batch_norm", "_batch_norm",
         "nn.functional.adaptive_", "nn.functional.interpolate", "nn.functional.max_unpool",
         "nn.functional.upsample")  # fmt: skip


def chosen(entries):
    """Operators that trainings use and that are refused, every other one of the rest, and of families that share all
    code of DTensor and of the fallback one of each eight; `bench operators` runs all."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    from meshwright_bench.operators.sweep import name_of

    def is_alike(one):
        is_elementwise = isinstance(one, BinaryUfuncInfo | UnaryUfuncInfo)
        return is_elementwise or one.name.startswith(ALIKE) or one.name.endswith("_copy")

    kept = {*REFUSED, *WRITES_PLAIN_TENSORS, *(name for group in GROUPS.values() for name in group)}
    rest = [one for one in entries if name_of(one) not in kept and one.name not in kept]
    alike = [one for one in rest if is_alike(one)]
    others = [one for one in rest if one not in alike]
    drawn = [*alike[::8], *others[::2]]
    return [one for one in entries if one not in rest or one in drawn]


def sweep(found):
    """Write the outcomes of operators by number of ranks; on one, inputs are replicated.

    In a process of its own, from which ranks are forked with PyTorch's samples, whose import takes seconds.
    """
    from meshwright_bench.operators.sweep import find_sample, name_of, operators, run_case

    entries, fork = {name_of(one): one for one in chosen(operators())}, multiprocessing.get_context("fork")
    trained = [name for group in GROUPS.values() for name in group]
    names = {2: [name for name in entries if name not in trained], 4: trained}
    options = {"gradients": True, "placements": (InputPlacement.SHARD,), "timeout_s": 60.0}  # for a loaded machine
    with mock.patch.object(multiprocessing, "get_context", lambda method: fork):
        cases = {n: run_side(Side.FALLBACK, num_ranks=n, names=tuple(names[n]), **options) for n in names}
    at, cases[1] = InputPlacement.REPLICATED, []
    with process_group(rank=0, num_ranks=1, device=torch.device("cpu"), timeout_s=60, store_path=f"{found}-store"):
        mesh = init_device_mesh("cpu", (1,))
        for name in dict.fromkeys([*REFUSED, *list(entries)[::4]]):
            cases[1].append(Case(name, at, *run_case(find_sample(entries[name]), at, Side.FALLBACK, mesh)))
    found.write_bytes(pickle.dumps(cases))


@pytest.mark.slow
def test_operators_and_their_backward_are_right_or_rejected_on_all_ranks(gang, tmp_path):
    """An operator that is wrong may kill its ranks, so these are no gang's. Most samples have 5 rows.

    On two ranks they are 3 and 2. On four, where one has none, run operators that trainings use.
    """
    pytest.importorskip("expecttest", reason="PyTorch's samples need expecttest: pip install expecttest")
    process = multiprocessing.get_context("forkserver").Process(target=sweep, args=(tmp_path / "found",))
    process.start()
    process.join()
    for ranks, cases in pickle.loads((tmp_path / "found").read_bytes()).items():
        bad = [case for case in cases if case.outcome in (Outcome.WRONG, Outcome.NOT_IMPLEMENTED, Outcome.OTHER_ERROR)]
        assert {case.operator for case in bad} == (WRITES_PLAIN_TENSORS if ranks == 2 else set()), bad
        assert all("mixes DTensors and a plain tensor" in case.note and "rank 0:" not in case.note for case in bad)
        assert {case.operator for case in cases if case.outcome is Outcome.REFUSED} == (REFUSED if ranks < 4 else set())
        counts = Counter(case.outcome for case in cases)
        assert counts[Outcome.RIGHT] > {1: 50, 2: 160, 4: 75}[ranks], counts
        assert counts[Outcome.UNDEFINED] < 25 and counts[Outcome.LEFT_OUT] < 20, counts


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
        figures = by_name(operator_figures(side, cases))
        assert figures[f"{side}.shard0.right"].value == 1 and figures[f"{side}.shard0.wrong"].is_met is is_met
        assert figures[f"{side}.replicate.right"].value == 0


def test_times_are_relative_to_outside_with_targets_for_the_step():
    sides = {"outside": [0.1, 0.2, 0.1], "for_dtensor": [0.1, 0.22, 0.104], "fallback": [0.11, 0.2, 0.12]}
    figures = {figure.name: figure for figure in time_figures({"step.wall": sides, "mm": sides})}
    assert figures["step.wall.outside_ms"].value == 100 and figures["mm.outside_us"].value == pytest.approx(1e5)
    assert figures["step.wall.for_dtensor"].value == pytest.approx(1.04)
    assert figures["step.wall.for_dtensor"].is_met is False and figures["mm.for_dtensor"].is_met is None
    assert figures["step.wall.fallback"].value == pytest.approx(1.1)
