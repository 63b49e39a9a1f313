"""Profiles of chosen steps: one file a range and rank, labelled with steps and actions, also of a run that stops."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from meshwright.errors import RunError, StoppedError
from meshwright.plan.rules import load
from meshwright.train.launch.rank_context import RankContext, RunSpec, StatusBoard
from meshwright.train.rank_run import run_rank
from meshwright.train.record.reporter import Reporter
from tests.helpers import small_corpus
from tests.train.runs import STEPS, Fault, choose, metrics, train

QUICK = [*STEPS, "train.validation_samples=0", "train.sample_tokens=0", "model.num_layers=1", "model.dim=32"]


def labels(path):
    """The steps and forwards in a profile, each in the order of their starts."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    marks = sorted((one["ts"], one["name"]) for one in events if one.get("cat") == "user_annotation")
    names = [name for _, name in marks]
    assert any(one["name"] == "aten::mm" for one in events)
    return [name for name in names if name.startswith("step ")], [
        name for name in names if re.fullmatch(r"\d+F\d+", name)
    ]


def files(out):
    return sorted(path.name for path in (out / "profile").iterdir())


@pytest.fixture
def run(tmp_path):
    """Runs one rank in this process, with a stop requested before step `stop`; gives the notes for the user."""
    corpus = small_corpus(tmp_path / "corpus")

    def run(*more, resume=None, stop=None):
        words, notes = [*QUICK, *corpus, *more], []
        board = StatusBoard([0] * StatusBoard.length(1))
        post = board.post

        def posting(rank, phase, step):
            post(rank, phase, step)
            if (phase, step) == ("step", stop):
                board.request_stop()

        class Notes(Reporter):
            def note(self, text):
                notes.append(text)

        board.post = posting
        folder = choose(words, out=tmp_path / "run", resume=resume)
        try:
            run_rank(RankContext(0, 1, 0, 1, None, board), RunSpec(load(None, words), Notes, folder=folder))
        except StoppedError:
            assert stop is not None
        return notes

    return run


@pytest.mark.slow
def test_a_rank_writes_a_file_a_range_and_computes_the_same(run, tmp_path):
    words = ["train.num_microbatches=2", "train.profile=2,4-5"]
    notes = run(*words)
    profiled = metrics(tmp_path / "run")
    assert files(tmp_path / "run") == ["rank-0-step-2.json.gz", "rank-0-steps-4-5.json.gz"]
    assert labels(tmp_path / "run/profile/rank-0-step-2.json.gz") == (["step 2"], ["0F0", "0F1"])
    assert labels(tmp_path / "run/profile/rank-0-steps-4-5.json.gz")[0] == ["step 4", "step 5"]
    assert notes[-1].startswith(f"profiles in {tmp_path}/run/profile: rank-0-step-2.json.gz · rank-0-steps-4-5.json.gz")
    assert "https://ui.perfetto.dev" in notes[-1]
    (tmp_path / "run").rename(tmp_path / "profiled")
    assert not any("profile" in note for note in run(words[0]))
    assert metrics(tmp_path / "run") == profiled and not (tmp_path / "run/profile").exists()


@pytest.mark.slow
def test_a_stopped_and_resumed_run_writes_the_steps_that_ran(run, tmp_path):
    notes = run("train.profile=3-6", stop=4)
    assert files(tmp_path / "run") == ["rank-0-steps-3-4.json.gz"] and "rank-0-steps-3-4.json.gz" in notes[-1]
    notes = run("train.profile=3-6", resume="auto")
    assert files(tmp_path / "run") == ["rank-0-steps-3-4.json.gz", "rank-0-steps-5-6.json.gz"]
    assert "steps-5-6" in notes[-1] and "steps-3-4" not in notes[-1]
    notes = run("train.steps=9", "train.profile=3-6", resume="auto")
    assert notes[-1] == "no step of train.profile = 3-6 was run, so there is no profile"


def test_a_profile_that_cannot_be_written_says_so(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile").write_text("a file")
    with pytest.raises(RunError, match=r"can't write rank-0-step-1\.json\.gz"):
        run("train.profile=1")


@pytest.mark.slow
def test_the_ranks_of_a_pipeline_that_stops_write_their_own_actions(tmp_path):
    """Through the launcher: each rank writes before the first to exit ends the others."""
    words = [*QUICK, *small_corpus(tmp_path / "corpus"), "mesh.pp=2", "model.num_layers=2", "train.num_microbatches=2",
             "train.profile=2-6", "train.profile_ranks=all"]  # fmt: skip
    with pytest.raises(StoppedError):
        train(words, tmp_path / "run", fault=Fault(rank=1, action="stop"))
    for rank in range(2):
        steps, forwards = labels(tmp_path / f"run/profile/rank-{rank}-steps-2-3.json.gz")
        assert steps == ["step 2", "step 3"] and forwards == [f"{rank}F0", f"{rank}F1"] * 2
