"""Compressed gradients in a run: steps settle errors, checkpoints hold them, and another layout starts from zero."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.checkpoint import save_load
from meshwright.config.resolve import notes_of
from meshwright.features.compression.run import CompressionOnRank, _difference, _without_compression
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.traffic import Purpose
from meshwright.train.build_job import build_job
from meshwright.train.record.reporter import Reporter, Summary
from meshwright.train.run_folder import RunFolder
from meshwright.train.training_loop import Trainer
from tests.helpers import open_data, rank_context
from tests.train.jobs import Pieces, load_words, make_job, make_task, pieces
from tests.train.runs import assert_bitwise_equal, final_state

LAST, MIDDLE = 4, 2
Edit = Callable[[RunPlan], RunPlan] | None
WORDS = (f"train.steps={LAST}", f"checkpoint.every={MIDDLE}", "checkpoint.keep=3", "mesh.dp_shard=2",
         "comm.gradients=loco2", "comm.weights=int8", "train.sample_tokens=0")  # fmt: skip


class Notes(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.summary: Summary | None = None

    def finished(self, summary: Summary) -> None:
        self.summary = summary

    def note(self, text: str) -> None:
        self.texts.append(text)


def mixed(plan: RunPlan) -> RunPlan:
    """A plan whose roots send gradients by another codec than its blocks."""
    stages = (replace(stage, root=replace(stage.root, gradients="int8")) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def reported_run(
    rank: int, world_size: int, words: tuple[str, ...], out: Path, checkpoint: Path | None, edit: Edit = None
) -> Notes:
    """A run as its ranks live it. What the reporter was told."""
    torch.set_num_threads(1)
    config = load_words(words)
    plan = make_plan(config) if edit is None else edit(make_plan(config))
    context = rank_context(rank, world_size)
    notes = Notes()
    job = build_job(config, plan, context, torch.device("cpu"))
    Trainer(
        job, make_task(config), open_data(config).fingerprint, RunFolder(out, checkpoint), notes, base_bytes=0
    ).run()
    return notes


def whole_run(
    rank: int, world_size: int, words: tuple[str, ...], out: Path, checkpoint: Path | None, edit: Edit = None
) -> list[str]:
    return reported_run(rank, world_size, words, out, checkpoint, edit).texts


def counted_on_rank(rank: int, world_size: int, words: tuple[str, ...], out: Path) -> Summary | None:
    return reported_run(rank, world_size, words, out, None).summary


def test_bytes_of_steps_are_counted_and_those_of_validations_not(gang, tmp_path):
    words = (*WORDS, "train.validate_every=1", "train.validation_samples=4")
    summary, _ = gang(2).run(counted_on_rank, words, tmp_path / "run")
    predicted = summary.traffic.over(LAST)
    expected = predicted.of(Purpose.GRADIENTS).sent + predicted.of(Purpose.WEIGHTS).sent
    assert summary.counted.sent() == expected and expected.total() > 0 and summary.all_to_alls == ()


@pytest.mark.parametrize(
    ("layout", "purpose"),
    [
        (("moe-tiny", "mesh.dp_shard=2", "mesh.ep=2", "model.routing=uniform"), Purpose.EXPERTS),
        (("mesh.cp=2",), Purpose.CONTEXT),
    ],
)
def test_all_to_alls_of_a_run_are_counted(gang, tmp_path, layout, purpose):
    words = (*layout, "train.steps=2", "train.sample_tokens=0")
    summary, _ = gang(2).run(counted_on_rank, words, tmp_path / "run")
    (found,) = summary.all_to_alls
    assert found.purpose == purpose and found.sent == found.explained > 0 and summary.counted is None


@pytest.fixture(scope="module")
def whole(gang, tmp_path_factory):
    """The folder of a run of WORDS."""
    out = tmp_path_factory.mktemp("whole")
    gang(2).run(whole_run, WORDS, out, None)
    return out


def resumed(gang, whole, broken, words, edit=None):
    """Go on from the middle of the run in `whole` with other words, in the folder `broken`. What was noted."""
    shutil.copy(whole / "metrics.jsonl", broken)
    middle = whole / "checkpoints" / f"{MIDDLE:08d}"
    num_ranks = load_words(words).mesh.axes().num_ranks()
    notes: list[str] = gang(num_ranks).run(whole_run, words, broken, middle, edit)[0]
    return notes


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_as_if_uninterrupted(gang, whole, tmp_path):
    notes = resumed(gang, whole, tmp_path, WORDS)
    assert_bitwise_equal(tmp_path, whole)
    state = final_state(whole)
    assert {"comm.rank0", "comm.rank1"} <= state.keys() and not torch.equal(state["comm.rank0"], state["comm.rank1"])
    assert not [note for note in notes if "error" in note]


@pytest.mark.slow
def test_a_run_with_several_codecs_goes_on_with_its_feedback(gang, tmp_path):
    out, broken = tmp_path / "whole", tmp_path / "broken"
    gang(2).run(whole_run, WORDS, out, None, mixed)
    broken.mkdir()
    notes = resumed(gang, out, broken, WORDS, mixed)
    assert_bitwise_equal(broken, out)
    assert not [note for note in notes if "error" in note]


def test_what_was_saved_is_restored_whatever_the_method_keeps(monkeypatch, tmp_path):
    """Also of a method without error feedback, which may count its random draws."""
    one, part = CompressionOnRank.__new__(CompressionOnRank), mock.Mock()
    part.state_dict.return_value = {"num_draws": torch.tensor(3)}
    one._has_feedback, one._name, one.identity, one._parts = False, "comm.rank0", {"gradients": "a"}, {0: part}
    monkeypatch.setattr(save_load, "tensor_names", lambda path: list(one.state()))
    monkeypatch.setattr(save_load, "read_tensors", lambda path, names: one.state())
    assert one.restore(tmp_path, mock.Mock(run={"comm": {"gradients": "b"}})) == ""
    assert not part.load_state_dict.called
    assert one.restore(tmp_path, mock.Mock(run={"comm": {"gradients": "a"}})) == ""
    part.load_state_dict.assert_called_once_with({"num_draws": torch.tensor(3)})


@pytest.mark.slow
def test_a_run_goes_on_without_the_feedback_it_had(gang, whole, tmp_path):
    """Weights are compressed still; exact gradients have no errors, and nothing to say of them."""
    notes = resumed(gang, whole, tmp_path, (*WORDS, "comm.gradients=exact"))
    assert (tmp_path / "checkpoints" / f"{LAST:08d}").is_dir()
    assert not [note for note in notes if "error feedback" in note]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("comm.gradients=loco4", "gradients = loco2, and this run has loco4"),
        ("train.freeze=norm.*", "freeze = [], and this run has ['norm.*']"),
        ("comm.ranks_per_node=1", "nodes = [0, 0], and this run has [0, 1]"),
        ("mesh.dp_shard=4", "mesh = [1, 1, 2, 1, 1], and this run has"),
    ],
)
def test_errors_of_another_layout_start_from_zero_and_it_says_so(gang, whole, tmp_path, change, words):
    notes = resumed(gang, whole, tmp_path, (*WORDS, change))
    (note,) = [note for note in notes if "error feedback" in note]
    assert "starts from zero" in note and words in note
    assert (tmp_path / "checkpoints" / f"{LAST:08d}").is_dir()


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({}, "has none"),
        ({"config": {"mesh": {"dp_shard": 2}}}, "gradients = exact, and this run has loco2"),
        ({"config": {"mesh": {"tp": 2}, "comm": {"gradients": "loco2"}}}, "mesh = [1, 1, 1, 1, 2], and this run has"),
        ({"config": {"mesh": {"dp_shard": 2}, "comm": {"gradients": "loco2"}}}, "has none"),
    ],
)
def test_a_checkpoint_of_a_run_without_compression_says_what_it_was(run: dict[str, Any], said: str) -> None:
    """Such runs write nothing about it; what differs is in their configuration."""
    now = {"gradients": "loco2", "mesh": [1, 1, 2, 1, 1]}
    assert said in _difference(_without_compression(mock.Mock(run=run)), now)


def skipped(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """The errors after one step, after another that is skipped for an overflow, and after one that is taken."""
    job, step = make_job(rank, world_size, WORDS)
    step(1)
    states = [job.features["compression"].state()]
    for number, factor in ((2, float("nan")), (3, 1.0)):
        assert step.update(number, step.accumulate(number) * factor).skipped == (factor != 1.0)
        states.append(job.features["compression"].state())
    return states


def test_a_skipped_step_commits_nothing(gang):
    for rank, (before, after, later) in enumerate(gang(2).run(skipped)):
        name = f"comm.rank{rank}"
        assert torch.equal(before[name], after[name]) and not torch.equal(after[name], later[name])


def held(rank: int, world_size: int, words: tuple[str, ...]) -> Pieces:
    """This rank's parameters after some steps."""
    job, step = make_job(rank, world_size, words)
    for number in (1, 2, 3):
        assert not step(number).skipped
    return pieces(job)


TP = ("mesh.tp=2", "mesh.dp_shard=2")
LOCO, INT8 = "comm.gradients=loco4", "comm.weights=int8"
REPLICAS = ("mesh.dp_replicate=2", "mesh.dp_shard=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (*TP, LOCO, INT8, "comm.ranks_per_node=2", "mesh.sequence_parallel=false", "train.precision=bfloat16"),
        (*REPLICAS, LOCO, INT8, "comm.ranks_per_node=2"),
        ("mesh.pp=2", "mesh.dp_shard=2", LOCO, "model.tie_embeddings=true", "train.num_microbatches=2"),
    ],
    ids=" ".join,
)
def test_copies_of_a_parameter_stay_equal(gang, words):
    """Of replicas, of what tensor parallel leaves whole, of what stages share: rounded by other neighbours on each."""
    seen: dict[tuple[str, str], torch.Tensor] = {}
    num_copies = 0
    for found in gang(4).run(held, (*words, "model.num_layers=2"), timeout_s=120):
        for name, piece in found.items():
            first = seen.setdefault((name, str(piece.index)), piece.values)
            num_copies += first is not piece.values
            assert torch.equal(first, piece.values), name
    assert num_copies


def norm(rank: int, world_size: int, words: tuple[str, ...]) -> float:
    _, step = make_job(rank, world_size, words)
    return step(1).grad_norm


@pytest.mark.parametrize("layout", ["mesh.dp_replicate=2", pytest.param("mesh.dp_shard=2", marks=pytest.mark.slow)])
def test_gradients_are_summed_and_not_averaged(gang, layout):
    """Which AdamW would not show."""
    expected = norm(0, 1, ())
    for way, limit in (("exact-via-all-to-all", 1e-4), ("loco4", 0.05)):
        assert gang(2).run(norm, (layout, f"comm.gradients={way}"))[0] == pytest.approx(expected, rel=limit)


def test_one_rank_sends_nothing_to_be_compressed():
    job, step = make_job(0, 1, (LOCO, INT8))
    assert step(1).loss > 0 and not job.features


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), ["comm.gradients = loco4 has no effect", "comm.weights = int8 has no effect"]),
        (("mesh.dp_replicate=2",), ["comm.weights = int8 has no effect"]),
        (("mesh.dp_shard=2",), []),
        (("comm.gradients=exact", "comm.weights=exact"), []),
    ],
)
def test_what_has_nothing_to_do_is_told(words, said):
    found = list(notes_of(load_words((LOCO, INT8, *words))))
    assert [note.partition(":")[0] for note in found] == said


def test_a_run_of_one_rank_says_that_nothing_is_compressed(tmp_path):
    notes = whole_run(0, 1, ("train.steps=1", "train.sample_tokens=0", LOCO), tmp_path, None)
    assert [note for note in notes if "comm.gradients = loco4 has no effect" in note]
