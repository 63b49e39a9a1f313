"""Where a run writes and what it starts from."""

from __future__ import annotations

import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshwright.checkpoint import atomic_directory
from meshwright.checkpoint.manifest import write_file
from meshwright.config.facts_for_family import model_facts
from meshwright.errors import CheckpointError, InputError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.serialize import to_json
from meshwright.train.choose_folder import choose_folder
from meshwright.train.run_folder import keep_other_plan
from tests.helpers import alternatives

CONFIG = load(None, ["name=mine"])


def save(folder, step, *, words=(), run=None, preset=None):
    """A checkpoint in a run's folder, with a manifest and no tensors."""
    config = load(preset, ["name=mine", *words])
    temporary = atomic_directory.begin(folder / "checkpoints", step)
    files = {"data": write_file(temporary / "data", b"x" * 1000)}
    run = {"config": config.model_dump(), "corpus": "text", "skipped_in_a_row": 0} if run is None else run
    model = dict(model_facts(config).identity)
    return atomic_directory.commit(temporary, step=step, model=model, run=run, files=files)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def choose(out=None, resume=None, config=CONFIG, corpus="text"):
    with ExitStack() as hold:
        return choose_folder(config, out=Path(out) if out else None, resume=resume, corpus=corpus, hold=hold)


def test_new_runs_are_numbered(tmp_path):
    assert [str(choose().path) for _ in range(3)] == ["runs/mine-1", "runs/mine-2", "runs/mine-3"]
    (tmp_path / "runs/mine-9").mkdir()
    (tmp_path / "runs/mine-x").mkdir()
    (tmp_path / "runs/other-20").mkdir()
    assert str(choose().path) == "runs/mine-10"


def test_names_with_wild_cards_are_taken_literally(tmp_path):
    (tmp_path / "runs/ab-7").mkdir(parents=True)
    assert str(choose(config=load(None, ["name=a."])).path) == "runs/a.-1"


@pytest.mark.parametrize("what", ["metrics", "checkpoint"])
def test_a_folder_with_a_run_in_it_takes_no_new_one(tmp_path, what):
    (tmp_path / "a").mkdir()
    if what == "metrics":
        (tmp_path / "a/metrics.jsonl").write_text("")
    else:
        save(tmp_path / "a", 3)
    with pytest.raises(InputError, match="a already holds a run") as caught:
        choose("a")
    assert caught.value.fix.startswith("meshwright run a,")
    assert choose("a", "auto").path == Path("a")


def test_auto_takes_the_newest_valid_of_the_newest_run(tmp_path):
    for number in (1, 2):
        save(tmp_path / f"runs/mine-{number}", number)
        save(tmp_path / f"runs/mine-{number}", number + 10)
    found = choose(resume="auto")
    assert str(found.path) == "runs/mine-2" and found.checkpoint.name == "00000012"
    (tmp_path / "runs/mine-2/checkpoints/00000012/data").write_bytes(b"")
    found = choose(resume="auto")
    assert found.checkpoint.name == "00000002"
    assert "skipped runs/mine-2/checkpoints/00000012: data is truncated" in found.notes[0]


def test_auto_without_a_checkpoint_starts_at_0_and_says_so():
    for out in (None, "new"):
        found = choose(out, "auto")
        assert found.checkpoint is None and "starting at step 0" in found.notes[-1]


@pytest.mark.parametrize("word", ["model.dim=64", "model.tie_embeddings=true", "model.rope_theta=5e5"])
def test_another_model_is_refused(tmp_path, word):
    path = save(tmp_path / "a", 3, words=[word])
    for resume in ("auto", str(path)):
        with pytest.raises(CheckpointError, match=word.partition("=")[0]):
            choose("a", resume)


def test_another_layout_precision_or_length_is_fine(tmp_path):
    save(tmp_path / "a", 3)
    for words in (["mesh.dp_shard=2"], ["train.precision=float64"], ["train.steps=9"], ["train.num_microbatches=2"]):
        assert choose("a", "auto", config=load(None, words)).checkpoint is not None


@pytest.mark.parametrize(
    ("preset", "before", "now"),
    [("llama-tiny", "train.seed=3", "train.seed=0"),
     ("llama-tiny", "data.packing=documents", "data.packing=none"),
     ("llama-tiny", "data.separator=none", "data.separator=3"),
     ("dit-digits", "diffusion.prediction=velocity", "diffusion.prediction=noise"),
     ("dit-digits", "diffusion.schedule=linear", "diffusion.schedule=cosine")],
)  # fmt: skip
def test_what_decides_the_samples_and_what_is_asked_of_the_model_stays(tmp_path, preset, before, now):
    save(tmp_path / "a", 3, words=[before], preset=preset)
    with pytest.raises(CheckpointError, match="but the checkpoint was trained with") as caught:
        choose("a", "auto", config=load(preset, ["name=mine", now]))
    assert caught.value.fix == before
    assert choose("a", "auto", config=load(preset, ["name=mine", caught.value.fix])).checkpoint is not None


MIXED = "data.mixture=['0.7:web/*.txt','0.3:stdlib']"


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [([MIXED], [MIXED], []),
     ([MIXED], ["data.mixture=['0.7:web/*.txt','0.2:stdlib','0.1:more']"],
      ["more was added", "the weight of stdlib was 30% and is 20%"]),
     ([MIXED], ["data.source=a"], ["data.mixture was set and is not set"]),
     ([], ["data.validation_source=v.txt"], ["data.validation_source was not set and is v.txt"]),
     ([MIXED], [MIXED, "data.validation_source=v.txt"], ["data.validation_source was not set and is v.txt"])],
)  # fmt: skip
def test_other_data_is_refused_and_the_difference_is_said(tmp_path, before, now, says):
    save(tmp_path / "a", 3, words=before)
    with pytest.raises(CheckpointError, match="the checkpoint was trained on another corpus") as caught:
        choose("a", "auto", config=load(None, ["name=mine", *now]), corpus="other")
    assert caught.value.what.partition(": ")[2] == "; ".join(says)
    assert "a new run, with another --out" in caught.value.fix
    if says:
        again = [*now, *alternatives(caught.value.fix)[0]]
        data, earlier = (load(None, ["name=mine", *words]).data for words in (again, before))
        assert data == earlier


def test_a_run_from_before_documents_had_a_beginning_resumes_without(tmp_path):
    saved = load(None, ["name=mine", "data.tokenizer=t"]).model_dump()
    del saved["data"]["bos"]
    save(tmp_path / "a", 3, run={"config": saved, "corpus": "text", "skipped_in_a_row": 0})
    with pytest.raises(CheckpointError, match="data.bos was none and is auto") as caught:
        choose("a", "auto", config=load(None, ["name=mine", "data.tokenizer=t"]), corpus="other")
    assert caught.value.fix.startswith("data.bos=none")


@pytest.mark.parametrize(("before", "now"), [([], "muon"), (["train.optimizer=muon"], "adamw")])
def test_a_run_resumes_with_its_optimizer(tmp_path, before, now):
    save(tmp_path / "a", 3, words=before)
    config = load(None, ["name=mine", f"train.optimizer={now}"])
    with pytest.raises(
        CheckpointError, match=f"train.optimizer = {now}, but the checkpoint was trained with"
    ) as caught:
        choose("a", "auto", config=config)
    assert choose("a", "auto", config=load(None, ["name=mine", caught.value.fix])).checkpoint is not None


def test_what_was_frozen_stays_frozen(tmp_path):
    """There is no optimizer state of it; more may be frozen."""
    save(tmp_path / "a", 3, words=["train.freeze=embed*"])
    with pytest.raises(CheckpointError, match=r"embed.weight is trained now, but was frozen") as caught:
        choose("a", "auto")
    for word in (caught.value.fix, "train.freeze=['embed.weight','blocks.0.*']"):
        assert choose("a", "auto", config=load(None, ["name=mine", word])).checkpoint is not None


def test_weights_alone_start_any_run(tmp_path):
    save(tmp_path / "a", 0, run={"imported_from": "x"})
    assert choose("a", "auto", config=load(None, ["train.seed=5"]), corpus="other").checkpoint is not None


def test_a_checkpoint_by_its_path_goes_on_in_its_folder(tmp_path):
    path = save(tmp_path / "a", 3)
    (tmp_path / "runs/mine-5").mkdir(parents=True)
    (tmp_path / "runs/mine-5/metrics.jsonl").write_text("{}\n")
    assert choose(resume=str(path)).path == tmp_path / "a"
    assert choose("a", str(path)).checkpoint == path
    assert choose("new", str(path)).path.name == "new"
    with pytest.raises(InputError, match="runs/mine-5 already holds a run"):
        choose("runs/mine-5", str(path))


def test_going_back_in_a_folder_is_refused_and_elsewhere_fine(tmp_path):
    path = save(tmp_path / "a", 3)
    later = save(tmp_path / "a", 6)
    with pytest.raises(InputError, match="already has 00000006, which is newer than 00000003") as caught:
        choose(resume=str(path))
    assert "--out" in caught.value.fix
    assert choose("new", str(path)).checkpoint == path
    (later / "data").unlink()  # what came after is not whole: nothing is lost by going on from here
    assert choose(resume=str(path)).path == tmp_path / "a"


def test_a_copied_checkpoint_starts_a_run_of_its_own(tmp_path):
    path = save(tmp_path / "a", 3)
    path.rename(tmp_path / "copied")
    assert str(choose(resume="copied").path) == "runs/mine-1"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in ("file", "file/x", "/proc/x", "/sys"):
        with pytest.raises(InputError, match="can't write to"):
            choose(out)


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize(
    ("name", "is_folder", "reason"),
    [("checkpoints", False, "File exists"), ("metrics.jsonl", True, "Is a directory"),
     ("plan.json", True, "Is a directory")],
)  # fmt: skip
def test_what_stands_where_a_run_writes_is_found_before_training(tmp_path, resume, name, is_folder, reason):
    (tmp_path / name).mkdir() if is_folder else (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"can't write to {tmp_path}/{name}: {reason}"):
        choose(out=tmp_path, resume=resume)
    assert sorted(one.name for one in tmp_path.iterdir()) == [name]


@pytest.mark.parametrize("resume", [None, "auto", "path"])
def test_a_folder_that_a_run_writes_to_takes_no_other(tmp_path, resume):
    path = save(tmp_path / "a", 3)
    word = str(path) if resume == "path" else resume
    with ExitStack() as hold:
        choose_folder(CONFIG, out=Path("a"), resume="auto", corpus="text", hold=hold)
        with pytest.raises(InputError, match=f"a is being written by another run: process {os.getpid()} ") as caught:
            choose("a", word)
        assert "another --out" in caught.value.fix and choose("b", word if resume == "path" else None)
    if resume:
        assert choose("a", word).checkpoint.name == "00000003"


def test_runs_that_start_at_once_have_folders_of_their_own():
    with ExitStack() as hold, ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda _: choose_folder(CONFIG, out=None, resume=None, corpus="x", hold=hold), range(8)))
    assert len({folder.path for folder in chosen}) == 8


def test_auto_does_not_start_again_where_checkpoints_are_damaged(tmp_path):
    for step in (3, 6):
        (save(tmp_path / "a", step) / "data").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoints of a is valid \(2\); .*data is truncated") as caught:
        choose("a", "auto")
    assert caught.value.exit_code == 2 and caught.value.where == "a/checkpoints/00000006"
    assert "another --out" in caught.value.fix and choose("b", "auto").checkpoint is None


def test_a_record_that_cannot_be_read_is_said_before_the_run(tmp_path):
    path = save(tmp_path / "a", 3)
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\ngarbage\n')
    for resume in ("auto", str(path)):
        with pytest.raises(InputError, match="metrics.jsonl has a line that is not a step: garbage") as caught:
            choose("a", resume)
        assert caught.value.where.endswith("a/metrics.jsonl, line 2")
    one, other = shlex.split(re.search(r"mv (.*), and", caught.value.fix)[1])
    Path(one).rename(other)
    assert choose("a", "auto").checkpoint == Path("a/checkpoints/00000003")


def test_the_plan_of_the_steps_so_far_is_kept(tmp_path):
    path = tmp_path / "plan.json"
    first, second = (make_plan(load(None, words)) for words in (["mesh.dp_shard=2"], ["mesh.dp_shard=2", "mesh.tp=2"]))
    assert keep_other_plan(path, first, 0) == [] and not list(tmp_path.iterdir())
    path.write_text(to_json(first), "utf-8")
    assert keep_other_plan(path, first, 4) == [] and path.exists()
    (note,) = keep_other_plan(path, second, 4)
    assert "plan-to-00000004.json" in note and "another layout" in note
    assert not path.exists() and (tmp_path / "plan-to-00000004.json").read_text("utf-8") == to_json(first)
    path.write_text("{", "utf-8")
    (note,) = keep_other_plan(path, second, 4)
    assert "can't read" in note and (tmp_path / "plan-to-00000004-2.json").read_text("utf-8") == "{"
    assert (tmp_path / "plan-to-00000004.json").read_text("utf-8") == to_json(first), "nothing is written over"
