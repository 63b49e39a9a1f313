"""The loop of one rank, in this process: what it saves, and how it ends, when numbers are not finite."""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from meshwright.checkpoint.manifest import list_checkpoints
from meshwright.errors import RunError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.train import rank_run
from meshwright.train.continued_run import find_start
from meshwright.train.launch.rank_context import RankContext, RunSpec, StatusBoard
from meshwright.train.rank_run import run_rank
from meshwright.train.record.reporter import Reporter
from meshwright.train.train_step import TrainStep
from tests.helpers import rank_context, small_corpus
from tests.train.runs import DETERMINISTIC, STEPS, choose, metrics


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("corpus")), "checkpoint.keep=2", "train.max_skipped_steps=2",
            "train.validate_every=0", "checkpoint.every=1", "train.warmup_steps=0"]  # fmt: skip


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """No run here draws its loss, which takes longer than its steps."""
    monkeypatch.setattr("meshwright.train.record.metrics.plot_loss", lambda *given, **named: None)


@pytest.fixture
def run(words, monkeypatch):
    """Runs in this process; of the steps in `spoilt` the loss is NaN, of those in `stop` a stop is asked for."""

    def run(out, *more, resume=None, spoilt=(), stop=(), validation=None, reporter=Reporter):
        accumulate = TrainStep.accumulate
        board = StatusBoard([0] * StatusBoard.length(1))

        def disturbed(self, step):
            if step in stop:
                board.request_stop()
            return accumulate(self, step) * (math.nan if step in spoilt else 1.0)

        with monkeypatch.context() as patch:
            patch.setattr(TrainStep, "accumulate", disturbed)
            if validation is not None:
                patch.setattr("meshwright.train.training_loop.validate", lambda *_: validation)
            config = load(None, [*STEPS, *words, *more])
            folder = choose([*words, *more], out=out, resume=resume)
            run_rank(RankContext(0, 1, 0, 1, None, board), RunSpec(config, reporter, folder=folder))

    return run


def kept(out):
    return [int(path.name) for path in list_checkpoints(out / "checkpoints")]


def fails(run, *args, **options):
    with pytest.raises(RunError) as caught:
        run(*args, **options)
    assert caught.value.exit_code == (3 if "as requested" in caught.value.what else 1)
    return caught.value


@pytest.mark.parametrize(("minutes", "saved"), [(30.0, [3, 6, 8]), (0.0, [8])])
def test_a_checkpoint_is_saved_when_its_time_has_come(run, tmp_path, monkeypatch, minutes, saved):
    """Steps of 12 minutes by the run's clock."""
    begun = []
    clock = SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: 720.0 * len(begun))
    monkeypatch.setattr("meshwright.train.training_loop.time", clock)
    monkeypatch.setattr(TrainStep, "accumulate", _noted(TrainStep.accumulate, begun))
    run(tmp_path / "a", "checkpoint.every=0", "checkpoint.keep=9", f"checkpoint.minutes={minutes}")
    assert kept(tmp_path / "a") == saved


def _noted(function, calls):
    def noted(*args):
        calls.append(args)
        return function(*args)

    return noted


def options_in(fix):
    """The folder and the checkpoint of the command that a fix begins with."""
    words = shlex.split(fix.partition(",")[0])
    assert words[:2] == ["meshwright", "run"] and words[3::2] in ([], ["--resume", "--out"])
    given = dict(zip(words[3::2], words[4::2], strict=True))
    start = find_start(words[2], Path(given["--out"]) if given else None, given.get("--resume"))
    return {"out": str(start.out), "resume": start.resume}


@pytest.mark.parametrize(("words", "saved"), [(("checkpoint.every=0",), []), (("checkpoint.every=3",), [3, 6]),
    (("checkpoint.every=4",), [4, 8])])  # fmt: skip
def test_no_checkpoint_is_saved_at_the_end_if_none_is_wanted(run, tmp_path, words, saved):
    run(tmp_path / "a", *words, "checkpoint.at_end=false")
    assert kept(tmp_path / "a") == saved


@pytest.mark.slow
def test_a_diverged_run_keeps_its_good_checkpoints_and_goes_on_from_them(run, tmp_path):
    error = fails(run, tmp_path / "a", "checkpoint.every=2", spoilt=range(4, 9))
    assert error.what.startswith("3 steps in a row were not finite") and kept(tmp_path / "a") == [2]
    assert f"the last good checkpoint is {tmp_path}/a/checkpoints/00000002" in error.what
    assert error.where == "step 6, samples 40 … 47"
    assert options_in(error.fix) == {"out": f"{tmp_path}/a", "resume": "auto"}
    run(tmp_path / "a", "checkpoint.every=2", resume="auto")
    assert kept(tmp_path / "a") == [6, 8] and [line["step"] for line in metrics(tmp_path / "a")] == list(range(1, 9))


@pytest.mark.slow
def test_what_no_later_loss_has_proven_is_not_called_good(run, tmp_path):
    """Step 3 is saved, and its own update may be what ruined the weights."""
    error = fails(run, tmp_path / "a", spoilt=range(4, 9))
    assert kept(tmp_path / "a") == [2, 3] and "00000002" in error.what
    found = options_in(error.fix)
    assert found["resume"].endswith("a/checkpoints/00000002") and not Path(found["out"]).exists()
    run(tmp_path / "b", "train.lr=1e-4", resume=found["resume"])
    assert kept(tmp_path / "b") == [7, 8]


def test_a_validation_proves_a_checkpoint(run, tmp_path):
    error = fails(run, tmp_path / "a", "train.validate_every=3", spoilt=range(4, 9))
    assert kept(tmp_path / "a") == [2, 3] and "good checkpoint is" in error.what and "00000003" in error.what
    assert options_in(error.fix)["resume"] == "auto"


def test_a_run_that_diverges_at_once_says_that_nothing_is_good(run, tmp_path):
    error = fails(run, tmp_path / "a", "train.lr=1e20")
    assert "no checkpoint is good" in error.what
    assert "another --out" in error.fix and "train.lr" in error.fix
    assert "not even the first step" in fails(run, tmp_path / "b", spoilt=range(1, 9)).fix
    assert kept(tmp_path / "b") == []


@pytest.mark.slow
def test_weights_that_it_came_from_are_named(run, tmp_path):
    run(tmp_path / "a", "train.steps=2")
    start = tmp_path / "a/checkpoints/00000002"
    error = fails(run, tmp_path / "b", resume=str(start), spoilt=range(1, 9))
    assert f"with the weights of {start}" in error.fix and kept(tmp_path / "b") == []
    error = fails(run, tmp_path / "c", "checkpoint.every=0", resume=str(start), spoilt=range(4, 9))
    assert f"good checkpoint is {start}" in error.what and options_in(error.fix)["resume"] == str(start)


def test_steps_skipped_now_and_then_are_no_failure(run, tmp_path):
    run(tmp_path / "a", spoilt=(2, 3, 6), stop=())
    assert kept(tmp_path / "a") == [7, 8]


@pytest.mark.slow
def test_a_stop_in_a_skipped_step_saves_nothing(run, tmp_path):
    error = fails(run, tmp_path / "a", spoilt=(4,), stop=(4,))
    assert error.what.startswith("stopped after step 4") and f"{tmp_path}/a/checkpoints/00000003" in error.what
    assert kept(tmp_path / "a") == [2, 3]
    run(tmp_path / "a", resume=options_in(error.fix)["resume"])
    assert kept(tmp_path / "a") == [7, 8]
    error = fails(run, tmp_path / "b", spoilt=(1,), stop=(1,))
    assert "there is no checkpoint" in error.what
    run(tmp_path / "b", resume=options_in(error.fix)["resume"])
    assert kept(tmp_path / "b") == [7, 8]


@pytest.mark.slow
def test_a_packed_run_goes_on_where_it_stopped(run, tmp_path):
    """Twice, from the middle of the documents, with batches prepared ahead: the bits of a run that was not stopped."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(400):
        (folder / f"{number}.txt").write_text(f"{number * 37 % 91} " * (1 + number * number % 9), "utf-8")
    words = ["data.packing=documents", f"data.source={folder}/*.txt", "data.prefetch=3", "train.num_microbatches=2"]
    for number, stop in enumerate((3, 6)):
        fails(run, tmp_path / "stopped", *words, stop=(stop,), resume="auto" if number else None)
    run(tmp_path / "stopped", *words, resume="auto")
    run(tmp_path / "whole", *words, "data.prefetch=0")
    found, expected = (
        [{name: line.get(name) for name in DETERMINISTIC} for line in metrics(tmp_path / name)]
        for name in ("stopped", "whole")
    )
    assert found == expected and len({line["loss"] for line in found}) == 8


def test_a_run_whose_last_step_is_skipped_fails(run, tmp_path):
    error = fails(run, tmp_path / "a", "train.validation_samples=0", spoilt=(8,))
    assert error.what.startswith("the last step was not finite") and error.where == "step 8, the last"
    assert kept(tmp_path / "a") == [6, 7] and "00000006" in error.what


def test_what_a_finite_validation_shows_at_the_end_is_saved_all_the_same(run, tmp_path):
    error = fails(run, tmp_path / "a", "checkpoint.every=0", spoilt=(8,))
    assert error.what.startswith("the last step was not finite") and "00000008" in error.what
    assert kept(tmp_path / "a") == [8]


def test_a_run_whose_last_validation_is_not_finite_fails(run, tmp_path):
    error = fails(run, tmp_path / "a", validation=math.nan)
    assert error.what.startswith("the last validation was not finite (loss nan)")
    assert kept(tmp_path / "a") == [6, 7] and "00000007" in error.what


@pytest.mark.slow
def test_also_when_nothing_was_left_to_train(run, tmp_path):
    run(tmp_path / "a")
    error = fails(run, tmp_path / "a", resume="auto", validation=math.inf)
    assert error.where == "step 8, the last" and kept(tmp_path / "a") == [7, 8]


@pytest.mark.slow
def test_fewer_steps_than_are_done_are_said_as_they_are(run, tmp_path):
    run(tmp_path / "a", "train.steps=4")
    told = []
    reporter = type("Told", (Reporter,), {"note": lambda _, text: told.append(text),
                                          "finished": lambda _, summary: told.append(summary)})  # fmt: skip
    run(tmp_path / "a", "train.steps=3", resume="auto", reporter=reporter)
    assert "step 4 is complete and train.steps = 3: nothing left to train" in told
    assert (told[-1].steps, told[-1].steps_here, told[-1].checkpoint.name) == (4, 0, "00000004")
    assert "train.warmup_steps = 20 exceeds train.steps = 3" not in " ".join(told[:-1])
    run(tmp_path / "b", "train.warmup_steps=20", reporter=reporter)
    assert any("train.warmup_steps = 20 exceeds train.steps = 8" in note for note in told if isinstance(note, str))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_trusts_the_launcher_but_for_the_memory_of_its_gpu(device: str) -> None:
    """The launcher checks the CPU's memory where it sees no GPU, which a rank may have all the same."""
    config = load(None, ["train.device=cpu"])
    spec = RunSpec(config, Reporter, plan=make_plan(config), process_bytes=1)
    checks = mock.patch("meshwright.train.rank_checks.plan_before_group", side_effect=RuntimeError("checked"))
    group = mock.patch.object(rank_run, "rank_group", side_effect=RuntimeError("trusted"))
    with (
        mock.patch.object(rank_run, "choose_device", return_value=torch.device(device)),
        checks,
        group,
        pytest.raises(RuntimeError, match="checked" if device == "cuda" else "trusted"),
    ):
        rank_run.run_rank(rank_context(), spec)


def test_news_of_features_are_told_once(run, tmp_path):
    told = []

    class Notes(Reporter):
        def note(self, text):
            told.append(text)

    run(tmp_path / "run", "capture.scope=layer", "capture.backend=simulate", reporter=Notes)
    assert [text for text in told if text.startswith("CUDA graphs")] != [] and len(told) == len(set(told))
