"""A stopped run goes on by the command that it prints, with the configuration that it was started with."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from meshwright.config.schema import RunConfig
from meshwright.config.source import to_toml
from meshwright.errors import CONTINUE, InputError, RunError, StoppedError, continue_command
from meshwright.plan.rules import load
from meshwright.train.continued_run import Start, changed_keys, check_source, find_start, naming
from tests.helpers import SMALL, small_corpus
from tests.train.runs import Fault, assert_bitwise_equal, metrics, train

WORDS = [*SMALL, "train.steps=40"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run in `old`, a newest one of the default preset, and a folder without one."""
    monkeypatch.chdir(tmp_path)
    for name in ("old", "runs/llama-tiny-1", "runs/llama-tiny-2"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.toml").write_text(to_toml(load(None, WORDS)), "utf-8")
    (tmp_path / "empty").mkdir()
    return tmp_path


OLD, NEWEST, SAVED = Path("old"), Path("runs/llama-tiny-2"), "old/checkpoints/00000003"
STARTS = {
    "a folder": (("old", None, None), Start("old", OLD, "auto")),
    "a folder, twice": (("old", OLD, None), Start("old", OLD, "auto")),
    "a folder, from one of its checkpoints": (("old", None, SAVED), Start("old", None, SAVED)),
    "a folder, from one of its checkpoints in another": (("old", Path("new"), SAVED), Start("old", Path("new"), SAVED)),
    "its file, a new run": (("old/config.toml", None, None), Start("old/config.toml", None, None)),
    "its file": (("old/config.toml", None, "auto"), Start("old/config.toml", OLD, "auto")),
    "no source": ((None, OLD, "auto"), Start("old", OLD, "auto")),
    "no source, from a checkpoint": ((None, None, SAVED), Start("old", None, SAVED)),
    "nothing": ((None, None, "auto"), Start(str(NEWEST), NEWEST, "auto")),
    "no source and no run there": ((None, Path("empty"), "auto"), Start(None, Path("empty"), "auto")),
    "a preset": (("moe-tiny", Path("new"), "auto"), Start("moe-tiny", Path("new"), "auto")),
    "a new run": ((None, Path("new"), None), Start(None, Path("new"), None)),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_command_says_which_run_it_continues(here: Path, name: str) -> None:
    given, expected = STARTS[name]
    assert find_start(*given) == expected


def test_a_folder_and_another_one_is_refused_with_both_ways(here: Path) -> None:
    with pytest.raises(InputError) as caught:
        find_start("old", Path("new"), None)
    first, second = commands_in(caught.value.fix)
    assert first == ["old"] and second == ["old/config.toml", "--out", "new"]


def commands_in(fix: str) -> list[list[str]]:
    """Return the words after `meshwright run` of each command in a fix."""
    words = [part.partition(",")[0].removesuffix(" starts a run like it") for part in fix.split("meshwright run ")[1:]]
    return [shlex.split(one.partition(";")[0]) for one in words]


def loaded(source: str | None, words: list[str], out: Path | None, resume: str | None) -> RunConfig:
    """Return the configuration of a command."""
    start = find_start(source, out, resume)
    config = load(start.source, words)
    check_source(start, config, words)
    return config


def test_a_folder_has_the_configuration_of_its_run(here: Path) -> None:
    assert loaded("old", [], None, None) == load(None, WORDS)
    assert loaded(None, ["train.lr=0.1"], OLD, "auto") == load(None, [*WORDS, "train.lr=0.1"])


@pytest.mark.parametrize("words", [WORDS, [*WORDS, "mesh.dp_shard=2", "train.lr=0.1"]])
def test_a_source_that_agrees_goes_on_with_what_words_change(here: Path, words: list[str]) -> None:
    assert loaded("llama-tiny", words, OLD, "auto") == load(None, words)


def test_a_source_that_contradicts_its_run_is_refused_with_commands_that_work(here: Path) -> None:
    words = [word for word in WORDS if not word.startswith("train.steps")]
    with pytest.raises(InputError) as caught:
        loaded("llama-tiny", [*words, "train.lr=0.1"], OLD, "auto")
    assert "train.steps=800" in caught.value.what and "40" in caught.value.what
    with_the_runs, with_the_presets = commands_in(caught.value.fix)
    for command, steps in ((with_the_runs, 40), (with_the_presets, 800)):
        config = loaded(command[0], command[1:], None, None)
        assert (config.train.steps, config.train.lr, config.model) == (steps, 0.1, load(None, WORDS).model)


def test_the_layout_is_changed_as_a_whole(here: Path) -> None:
    (here / "old/config.toml").write_text(to_toml(load(None, [*WORDS, "mesh.dp_shard=2"])), "utf-8")
    words = [*WORDS, "mesh.tp=2"]
    assert loaded("llama-tiny", words, OLD, "auto") == load(None, words)
    with pytest.raises(InputError, match="mesh.dp_shard=1"):
        loaded("llama-tiny", WORDS, OLD, "auto")


def test_one_key_is_not_taken_for_another_that_begins_like_it(here: Path) -> None:
    words = ["train.lr_schedule=wsd", "train.decay_steps=0"]
    (here / "own.toml").write_text(to_toml(load(None, [*WORDS, *words])), "utf-8")
    with pytest.raises(InputError, match=r"own.toml has train.lr_schedule=wsd, but the run in old was .* cosine\n"):
        loaded("own.toml", ["train.lr=0.1", "train.decay_steps=0"], OLD, "auto")


def test_an_earlier_versions_configuration_lacks_keys(here: Path) -> None:
    assert changed_keys({"train": {"steps": 40, "gone": 1}}, load(None, WORDS)) == []
    assert changed_keys({"train": {"steps": 30}}, load(None, WORDS)) == [("train.steps", 30, 40)]


LISTS = ["data.mixture=['1:a.txt','2:b.jsonl#body']", "train.parameter_groups=embedding:lr=0.01", "train.freeze=embed*"]


@pytest.mark.parametrize("words", [[], *([one] for one in LISTS)])
def test_a_saved_configuration_differs_in_nothing(words: list[str]) -> None:
    config = load(None, words)
    assert changed_keys(config.model_dump(mode="json"), config) == []


def test_errors_of_a_run_name_its_folder() -> None:
    with pytest.raises(RunError) as caught, naming(Path("a run")):
        raise RunError("a rank was killed", fix=f"continue with {CONTINUE}")
    assert (
        caught.value.fix == "continue with meshwright run 'a run'" == f"continue with {continue_command(Path('a run'))}"
    )


LAYOUTS = {"dp_shard 2": ("mesh.dp_shard=2",), "pp 2": ("mesh.pp=2", "train.num_microbatches=2")}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_stopped_run_prints_ends_it_as_if_it_had_not_stopped(
    forked_meshwright: Callable[..., CompletedProcess[str]], tmp_path: Path, name: str
) -> None:
    words = [*small_corpus(tmp_path), *LAYOUTS[name], "train.lr=0.02", "train.precision=bfloat16"]
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    train(words, tmp_path / "whole")
    with pytest.raises(StoppedError) as caught:
        train(words, tmp_path / "stopped", fault=Fault(phase="step", step=3, action="stop"))
    [command] = commands_in(caught.value.fix)
    done = forked_meshwright("run", *command)
    assert done.returncode == 0 and "changed since" not in done.stdout, done.stderr
    assert_bitwise_equal(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.slow
def test_what_changes_is_said(forked_meshwright: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(StoppedError):
        train([*small_corpus(tmp_path), "mesh.pp=2"], tmp_path / "run", fault=Fault(step=3, action="stop"))
    words = ["mesh.pp=1", "mesh.dp_shard=2", "train.lr=0.001"]
    done = forked_meshwright("run", str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.splitlines()
    assert any(line.startswith("changed since step 3: train.lr 0.004 → 0.001") for line in notes), notes
    assert "layout: pp 2 → dp_shard 2" in notes and len(metrics(tmp_path / "run")) == 8
