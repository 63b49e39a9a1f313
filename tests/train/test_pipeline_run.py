"""Pipelined runs: the same numbers as one process, and checkpoints that fit any layout."""

from __future__ import annotations

import json
import shutil

import pytest

from meshwright.pipeline.timeline import from_json
from tests.helpers import small_corpus
from tests.train.runs import STEPS, metrics, train

pytestmark = pytest.mark.slow

PIPELINED = ["mesh.pp=2", "train.num_microbatches=4"]
LAYOUTS = {
    "zb-v, dp_shard": [*PIPELINED, "pipeline.schedule=zb-v", "mesh.dp_shard=2"],
    "interleaved, tp": [*PIPELINED, "pipeline.schedule=interleaved", "mesh.tp=2"],
}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Tied, so that checkpoints hold a parameter that two stages have."""
    return [*small_corpus(tmp_path_factory.mktemp("corpus")), "train.precision=float64", "model.num_layers=4",
            "model.tie_embeddings=true", "model.dim=32", "model.ffn_dim=48"]  # fmt: skip


def gone_on(words, folder, copy):
    """Metrics of a run that goes on, in a copy of its folder, from its last checkpoint but one."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints/00000008")
    train(words, copy, resume="auto")
    return metrics(copy)


@pytest.fixture(scope="module")
def one_process_out(words, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    train(words, out)
    return out


@pytest.fixture(scope="module")
def one_process(one_process_out):
    return metrics(one_process_out)


@pytest.fixture(scope="module")
def pipelined_out(forked_meshwright, words, tmp_path_factory):
    """Through the command."""
    out = tmp_path_factory.mktemp("pipelined") / "run"
    done = forked_meshwright(
        "run", *STEPS, *words, *LAYOUTS["zb-v, dp_shard"], "train.trace=true", "--out", out, timeout_s=300
    )
    assert done.returncode == 0, done.stderr
    return out


def assert_alike(found, expected):
    assert [line["samples"] for line in found] == [line["samples"] for line in expected]
    for key in ("loss", "grad_norm", "validation_loss"):
        values = [[line[key] for line in lines if key in line] for lines in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-9), key


@pytest.mark.parametrize("layout", ["zb-v, dp_shard", "one process"])
def test_a_pipelined_run_goes_on_from_its_checkpoint(words, one_process, pipelined_out, tmp_path, layout):
    again = gone_on([*words, *LAYOUTS.get(layout, [])], pipelined_out, tmp_path / "run")
    assert_alike(again, one_process)
    assert layout == "one process" or again == metrics(pipelined_out)  # bitwise


def test_a_checkpoint_of_one_process_goes_on_in_a_pipeline(words, one_process_out, one_process, tmp_path):
    assert_alike(gone_on([*words, *LAYOUTS["interleaved, tp"]], one_process_out, tmp_path / "run"), one_process)


def test_a_trace_shows_every_computation_of_the_last_step(one_process, pipelined_out):
    assert_alike(metrics(pipelined_out), one_process)
    timelines = from_json((pipelined_out / "timeline.json").read_text())
    predicted, measured = timelines["predicted"], timelines["measured"]
    assert measured.num_ranks == 2 and len(measured.spans) == 2 * 2 * 4 * 3  # ranks, chunks, micro-batches, F I W
    shown = {(span.rank, str(span.action)) for span in measured.spans}
    assert shown == {(span.rank, str(span.action)) for span in predicted.spans} and len(shown) == 48
    for rank in range(2):
        own = measured.of_rank(rank)
        assert all(first.end <= second.start for first, second in zip(own, own[1:], strict=False))
    assert predicted.makespan > 0 and measured.makespan > 0
    events = json.loads((pipelined_out / "trace.json").read_text())["traceEvents"]
    assert len(events) == 2 * (1 + 2 + 48)
    assert (pipelined_out / "timeline.svg").read_text().count("measuredrank") >= 48
