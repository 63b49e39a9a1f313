"""Loads of experts: the counts of a step on any layout, metrics and heat map of a run, also of a resumed one."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint import save_load
from meshwright.nn.step_handles import load_counters, step_buffers
from meshwright.plan.rules import load
from meshwright.plan.traffic import predict_traffic
from meshwright.plan.verify import verify
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from meshwright.train import step_handles
from meshwright.train.choose_folder import choose_folder
from meshwright.train.launch.rank_context import RankContext, RunSpec, StatusBoard
from meshwright.train.rank_run import run_rank
from meshwright.train.record.figures import MAX_COLUMNS, draw_expert_load, read_history
from meshwright.train.record.metrics import LoadSummary, has_full_counts, summarize_load
from meshwright.train.record.record_files import read_metrics
from meshwright.train.record.reporter import Reporter
from meshwright.train.train_step import TrainStep
from tests.helpers import open_data, quick_and_slow
from tests.prove.proofs import prove_with, record_on_rank
from tests.train.jobs import job_of, run_on
from tests.train.routed_family import NUM_EXPERTS
from tests.train.runs import assert_bitwise_equal, metrics
from tests.train.test_traffic import Leaving

PRESET = "tests/train/routed.toml"
SIZES = [number for number in NUM_EXPERTS if number is not None]
TOKENS = 8 * 16
"""Tokens of a step."""
PARTS = "train.num_microbatches=2"


def steps(rank, world_size, words):
    """Counts of two steps on every rank, of a skipped one after them, and the totals of this rank's counters."""
    job, step = job_of(load(PRESET, words), rank, world_size)
    verify(job.plan)
    counts = []
    for number in (1, 2):
        step(number)
        counts.append(step.load_counts())
    step.update(3, step.accumulate(3) * math.nan)
    totals = {
        name: (counter.value.tolist(), counter.latest.tolist())
        for part in job.parts().values()
        for name, counter in load_counters(part.module)
    }
    return counts, step.load_counts(), totals


LAYOUTS = [
    (2, ("mesh.dp_shard=2", PARTS)),
    (2, ("mesh.tp=2",)),
    (2, ("mesh.pp=2", PARTS)),
    (4, ("mesh.pp=2", "mesh.dp_shard=2", "pipeline.chunks=2", PARTS)),
    (4, ("mesh.pp=2", "mesh.tp=2", "mesh.sequence_parallel=false", "recompute.policy=full", PARTS)),
]


@pytest.mark.parametrize(("world_size", "layout"), quick_and_slow(LAYOUTS[1:], [LAYOUTS[1], LAYOUTS[2]]))
def test_counts_are_those_of_one_process(gang, corpus, world_size, layout):
    [(expected, skipped, whole)] = run_on(gang, 1, steps, corpus)
    assert skipped is None and [[len(layer) for layer in step] for step in expected] == [SIZES] * 2
    assert all(sum(layer) == TOKENS for step in expected for layer in step)
    assert [latest for _, latest in whole.values()] == expected[1]
    held = {}
    for counts, skipped, totals in run_on(gang, world_size, steps, [*corpus, *layout]):
        assert counts == expected and skipped is None
        assert all(whole[name] == total for name, total in totals.items())
        held |= totals
    assert held == whole


@pytest.mark.parametrize(("world_size", "layout"), quick_and_slow([LAYOUTS[1], LAYOUTS[3]], [LAYOUTS[1]]))
def test_counts_are_those_of_the_reference(gang, corpus, world_size, layout):
    config = as_proof(load(PRESET, [*corpus, *layout]))
    result = prove_with(gang(world_size).run(record_on_rank, config, timeout_s=120), config)
    assert result.passed, "\n".join(render(result))


def one_by_one(rank, world_size, words):
    """Whether a step's updates are bitwise those summed buffer by buffer; the number of buffers and of all-reduces."""
    job, step = job_of(load(PRESET, words), rank, world_size)
    loss = step.accumulate(1)
    expected, summed = {}, 0
    for number, part in job.parts().items():
        described = {
            kind.full_name(b.name, layer): b for kind, layer in job.plan.held(part.stage) for b in kind.buffers
        }
        for name, buffer in step_buffers(part.module):
            expected[number, name] = (buffer, total := buffer.pending())
            for axis in described[f"{name}.value"].summed:
                torch.distributed.all_reduce(total, group=job.mesh.get_group(axis))
                summed += 1
    with mock.patch.object(step_handles, "all_reduce_sum", wraps=step_handles.all_reduce_sum) as counted:
        step.update(1, loss)
    equal = all(torch.equal(buffer.value, total) for buffer, total in expected.values())
    return equal and any(total.is_floating_point() for _, total in expected.values()), summed, counted.call_count


@pytest.mark.parametrize(
    ("layout", "sums"),
    [
        (("mesh.dp_shard=4",), [(7, 4)] * 4),  # one for all integers, and three of floats
        pytest.param(
            ("mesh.dp_shard=2", "mesh.pp=2", PARTS), [(5, 4)] * 2 + [(2, 3)] * 2, marks=pytest.mark.slow
        ),  # and one over pp
    ],
)
def test_updates_summed_together_are_those_summed_one_by_one(gang, corpus, layout, sums):
    found = gang(4).run(one_by_one, [*corpus, *layout], timeout_s=120)
    assert [equal for equal, *_ in found] == [True] * 4
    assert [(alone, together) for _, alone, together in found] == sums


def leaving(rank, world_size, words):
    """Bytes that leave a rank in a step, and what the plan predicts."""
    job, step = job_of(load(PRESET, words), rank, world_size)
    step(1)
    with Leaving() as mode:
        step(2)
    return mode.total, predict_traffic(job.plan, rank=rank).sent().total()


@pytest.mark.parametrize(("world_size", "layout"), quick_and_slow(LAYOUTS[:4], [LAYOUTS[2]]))
def test_traffic_is_predicted_to_the_byte(gang, corpus, world_size, layout):
    for found, predicted in gang(world_size).run(leaving, [*corpus, *layout], timeout_s=120):
        assert found == predicted


def run_here(words, out, *, resume=None, spoilt=()):
    """A run in this process; the loss of the steps in `spoilt` is not finite. Returns what was reported."""
    reported = []

    class Listening(Reporter):
        def progress(self, progress):
            reported.append(progress)

        def finished(self, summary):
            reported.append(summary)

    accumulate = TrainStep.accumulate

    def disturbed(self, step):
        return accumulate(self, step) * (math.nan if step in spoilt else 1.0)

    config = load(PRESET, words)
    board = StatusBoard([0] * StatusBoard.length(1))
    with ExitStack() as hold, mock.patch.object(TrainStep, "accumulate", disturbed):
        folder = choose_folder(config, out=out, resume=resume, corpus=open_data(config).fingerprint, hold=hold)
        run_rank(RankContext(0, 1, 0, 1, None, board), RunSpec(config, Listening, folder=folder))
    return reported


def test_what_a_run_records(corpus, tmp_path):
    *progress, summary = run_here(corpus, tmp_path / "run", spoilt=(3,))
    lines = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    for line, shown in zip(lines, progress, strict=True):
        if line["step"] == 3:
            assert line["skipped"] and not {"expert_load", "expert_counts"} & line.keys() and shown.expert_load is None
            continue
        counts = line["expert_counts"]
        loads = [np.array(layer) / np.mean(layer) for layer in counts]
        assert [sum(layer) for layer in counts] == [TOKENS] * 3
        assert line["expert_load"]["unused"] == sum(int((load == 0).sum()) for load in loads)
        assert line["expert_load"]["max_over_mean"] == pytest.approx(max(load.max() for load in loads))
        assert shown.expert_load == line["expert_load"]["max_over_mean"]
    assert summary.figures == ("loss.png", "expert-load.png")
    assert (tmp_path / "run/expert-load.png").read_bytes().startswith(b"\x89PNG")
    totals = save_load.read_tensors(tmp_path / "run/checkpoints/00000006", ["model.blocks.3.router.load.value"])
    counted = sum(np.array(line["expert_counts"][2]) for line in lines if not line["skipped"])
    assert totals["model.blocks.3.router.load.value"].tolist() == counted.tolist()


def test_a_resumed_run_goes_on_counting(corpus, tmp_path):
    words = [*corpus, "checkpoint.every=2"]
    run_here(words, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for last in ("00000004", "00000006"):
        shutil.rmtree(tmp_path / "resumed/checkpoints" / last)
    (tmp_path / "resumed/expert-load.png").unlink()
    run_here(words, tmp_path / "resumed", resume="auto")
    assert_bitwise_equal(tmp_path / "resumed", tmp_path / "whole")
    assert all("expert_counts" in line for line in metrics(tmp_path / "resumed"))
    figures = [(tmp_path / name / "expert-load.png").read_bytes() for name in ("whole", "resumed")]
    assert figures[0] == figures[1]


def test_a_large_model_has_all_counts_in_some_lines_only(corpus, tmp_path):
    words = [*corpus, "train.log_every=4"]
    with mock.patch("meshwright.train.record.metrics.MAX_COUNTS_PER_STEP", sum(SIZES) - 1):
        run_here(words, tmp_path / "run")
    lines = list(read_metrics(tmp_path / "run/metrics.jsonl"))
    assert [line["step"] for line in lines if "expert_counts" in line] == [1, 4, 6]
    assert all(line["expert_load"]["max_over_mean"] >= 1 for line in lines)
    assert (tmp_path / "run/expert-load.png").exists()


def test_when_all_counts_are_recorded():
    for layers, expected in ((32, [*range(1, 26)]), (33, [1, 10, 20, 25])):
        counts = [[1] * 32] * layers
        assert [n for n in range(1, 26) if has_full_counts(counts, step=n, last=25, every=10)] == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[5, 5], [1, 2, 3]], LoadSummary(1.5, 0)),
        ([[8, 0, 0, 0], [2, 2]], LoadSummary(4.0, 3)),
        ([[0, 0], [2, 0]], LoadSummary(2.0, 3)),
        ([[0, 0]], LoadSummary(None, 2)),
    ],
)
def test_the_balance_of_a_step(counts, expected):
    assert summarize_load(counts) == expected


def line(step, counts):
    return {"step": step, "loss": 1.0, "expert_counts": counts}


@given(st.integers(1, 40), st.sampled_from([2, 4, 8]), st.randoms())
def test_bins_sum_consecutive_steps(num_lines, max_bins, random):
    counts = [
        [[random.randrange(9) for _ in range(2)], [random.randrange(9) for _ in range(3)]] for _ in range(num_lines)
    ]
    lines = [line(i + 1, one) for i, one in enumerate(counts)]
    history = read_history(lines, [2, 3], max_bins=max_bins)
    assert history.loads.shape == (5, len(history.steps)) and len(history.steps) <= max_bins
    assert len(history.steps) > max_bins // 2 or num_lines <= max_bins
    starts = [0, *history.steps[:-1]]
    assert (
        history.steps[-1] == num_lines and len({b - a for a, b in zip(starts, history.steps, strict=True)} - {0}) <= 2
    )
    for i, (start, stop) in enumerate(zip(starts, history.steps, strict=True)):
        for layer, rows in ((0, slice(0, 2)), (1, slice(2, 5))):
            total = np.sum([counts[n][layer] for n in range(start, stop)], axis=0)
            if total.any():
                assert history.loads[rows, i] == pytest.approx(total / total.mean())
            else:
                assert np.isnan(history.loads[rows, i]).all()


def test_lines_without_counts_or_with_others_are_left_out():
    lines = [{"step": 1, "loss": 1.0}, line(2, [[1, 3]]), line(3, [[1, 2, 3]]), line(4, [[2, 2]])]
    history = read_history(lines, [2], max_bins=10)
    assert history.steps.tolist() == [2, 4] and history.loads.T.tolist() == [[0.5, 1.5], [1.0, 1.0]]
    assert read_history(lines[:1], [2], max_bins=10) is None


HISTORIES = {
    "one step": [line(1, [[1, 3, 0], [2, 2]])],
    "layers without tokens": [line(n, [[0, 0, 0], [n, 2]]) for n in range(1, 9)],
    "some steps": [line(n, [[1, n, 3], [2, 2]]) for n in (1, 10, 20, 30)],
    "more steps than columns": [line(n, [[1, n, 3], [2, n % 7]]) for n in range(1, MAX_COLUMNS + 3)],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_heat_map_is_drawn(tmp_path, name):
    path, out = tmp_path / "metrics.jsonl", tmp_path / "expert-load.png"
    path.write_text("".join(json.dumps(one) + "\n" for one in HISTORIES[name]))
    assert draw_expert_load(path, out, title="x", experts={"layer 0": 3, "layer 1": 2})
    assert out.read_bytes().startswith(b"\x89PNG")
    out.unlink()
    assert not draw_expert_load(path, out, title="x", experts={"layer 0": 7}) and not out.exists(), "counts of others"
