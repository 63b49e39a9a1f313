"""Fixes of errors work: what they name exists, and a command that follows them ends, or meets another error.

Commands run in this process, up to where a run would start its processes. Those of transformers' models are followed
in tests/models/hf/test_refusals.py, single rules in tests/config, and all that is drawn at random in tests/fuzz.
"""

from __future__ import annotations

import ast
import codecs
import gzip
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import meshwright
from meshwright import api
from meshwright.checkpoint import atomic_directory
from meshwright.checkpoint.manifest import write_file
from meshwright.cli.main import app
from meshwright.config.facts_for_family import model_facts
from meshwright.config.overlay import fields, table_of
from meshwright.config.source import smallest_preset
from meshwright.models.contract.family import family_names
from meshwright.plan.rules import load
from tests.data.chats.formats import CHATML, build, chat
from tests.fuzz.case import Case
from tests.fuzz.judge import MAX_REFUSALS, ways
from tests.helpers import open_data, outcome, shown_error

KINDS = family_names()
KEYS = {key for kind in KINDS for key in fields(kind)}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
KEY = re.compile(r"(?<![\w.}-])([a-z_0-9]+(?:\.[a-z_0-9]+)+)=(?!=)")
COMMAND = re.compile(r"\bmeshwright ([a-z]+(?: [a-z]+)?)([^`;|]*)")
NOT_COMMANDS = {"by default", "capture plan", "pipeline table"}
"""What follows our name elsewhere: the first words of our files."""
SHELL = ("chmod", "cp", "gunzip", "iconv", "mkdir", "mv", "rm")


def texts(source: str) -> Iterator[str]:
    """The strings of a module that aren't docstrings; what is filled into them stands as {}."""
    tree = ast.parse(source)
    skipped = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    skipped |= {id(part) for one in ast.walk(tree) if isinstance(one, ast.JoinedStr) for part in one.values}
    for one in ast.walk(tree):
        if isinstance(one, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in one.values)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in skipped:
            yield one.value


def unknown_keys(text: str) -> list[str]:
    """The keys that a text sets, of our sections, that no family has."""
    named = (key for key in KEY.findall(text) if key.partition(".")[0] in SECTIONS)
    return [key for key in named if key not in KEYS and not any(table_of(kind, key) for kind in KINDS)]


@cache
def own_commands() -> Any:
    """The command, with its parameters."""
    return typer.main.get_command(app)


def unknown_commands(text: str) -> list[str]:
    """The commands of ours that a text names and that don't exist, and the options that they don't have."""
    top, found = own_commands(), []
    for names, rest in COMMAND.findall(text):
        command = top.commands.get(names) or top.commands.get(names.split()[0])
        if hasattr(command, "commands"):
            command = command.commands.get(names.partition(" ")[2])
        if command is None:
            found.append(names)
            continue
        own = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        options = re.findall(r"(?<=\s)(--?[a-z][a-z-]*)", rest.partition(", then ")[0].partition(" without ")[0])
        found += [f"{names} {option}" for option in options if option not in own]
        found += [f"{names} …"] if "…" in rest.partition(", then ")[0] else []  # it can't be typed
    return found


@pytest.fixture(scope="module")
def sources() -> Mapping[str, list[str]]:
    """The strings of each module of the package."""
    root = Path(meshwright.__file__).parent
    return {str(path.relative_to(root)): list(texts(path.read_text("utf-8"))) for path in sorted(root.rglob("*.py"))}


@pytest.mark.parametrize("unknown", [unknown_keys, unknown_commands])
def test_what_messages_name_exists(sources: Mapping[str, list[str]], unknown: Callable[[str], list[str]]) -> None:
    wrong = {(name, one) for name, found in sources.items() for text in found for one in unknown(text)}
    assert {one for one in wrong if one[1] not in NOT_COMMANDS} == set()


def test_a_message_that_names_nothing_is_found() -> None:
    [doc, fix] = ['"""Sets model.lora.beta=1."""\n', 'error(fix=f"set model.lora.alpha={before} train.steps={n}")']
    assert [unknown_keys(text) for text in texts(doc + fix)] == [["model.lora.alpha"]]
    wrong = {
        "meshwright trian llama-tiny": ["trian llama"], "`meshwright checkpoint fetch x`": ["checkpoint fetch"],
        "meshwright run --outt x --resume auto": ["run --outt"], "meshwright plan … -x FILE": ["plan -x", "plan …"],
    }  # fmt: skip
    assert {text: unknown_commands(text) for text in wrong} == wrong
    right = ("meshwright run a.toml --out x", "meshwright checkpoint import {} runs/imported, then --out runs/imported")
    assert not any(unknown_commands(text) or unknown_keys(text) for text in right)


VALUES = ("nonsense", "-1", "0", "none", "3")


@pytest.mark.slow  # all keys and values
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "module"])
def test_the_fix_of_a_wrong_value_leads_on(kind: str) -> None:
    """For each key that families before don't have."""
    earlier = {key for other in KINDS[: KINDS.index(kind)] if other != "module" for key in fields(other)}
    preset = smallest_preset([kind])
    refused = 0
    for key in fields(kind).keys() - earlier:
        for value in VALUES:
            case = Case(preset, (f"{key}={value}",))
            error = outcome(case.words, preset)
            if isinstance(error, Exception):
                refused += 1
                found = list(ways({"error": error.what, "fix": error.fix}, case))
                assert found, f"{case.command()}: {error}"
                for one in found:
                    again = outcome(one.words, one.preset)
                    assert getattr(again, "what", "") != error.what, f"{case.command()}, {one.command()}: {error}"
    assert refused or not fields(kind).keys() - earlier


TEXT = "".join(f"def step_{n}(x):\n    return x * {n * 7919 % 1000}\n" for n in range(1500))
FRAMED = ("data.tokenizer=chat", "model.vocab_size=320")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of each kind, right and wrong."""
    folder = tmp_path_factory.mktemp("files")
    records = [{"body": f"def {one}", "number": 3, "my text": one} for one in TEXT.split("def ") if one]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    for path, content in {
        "texts/a.txt": TEXT, "texts/b.txt": TEXT[::-1], "ä [1] b/a.txt": TEXT[1:], "ä [1] b/b.txt": TEXT[::-1],
        "lines.jsonl": lines, "two words.jsonl": lines, "array.jsonl": json.dumps(records),
        "bom.jsonl": "\ufeff" + lines, "spaces.jsonl": lines.replace('"body"', '"a b"').replace('"my text"', '"c d"'),
        "chats.jsonl": "".join(json.dumps({"messages": chat(f"{n}?", f"It is {n}.")}) + "\n" for n in range(400)),
        "not-toml.toml": "[train\n", "plan.json": "{}",
    }.items():  # fmt: skip
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(content, "utf-8")
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "utf-16.txt").write_bytes(codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"))
    (folder / "latin-1.txt").write_text(f"# caf\xe9\n{TEXT}", "latin-1")
    (folder / "latin-1.jsonl").write_text(lines.replace("return", "caf\xe9"), "latin-1")
    (folder / "packed.txt.gz").write_bytes(gzip.compress((folder / "latin-1.txt").read_bytes()))
    (folder / "links").mkdir()
    (folder / "links/a.txt").write_text(TEXT, "utf-8")
    (folder / "links/b.txt").symlink_to("nowhere")
    build(folder / "chat", CHATML)
    return folder


@pytest.fixture
def place(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with these files, as the current one, in which runs end before they start processes."""
    shutil.copytree(files, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "launch", lambda *_arguments, **_options: raise_exit())
    return tmp_path


def raise_exit() -> None:
    raise SystemExit(0)


def follow(here: Callable[..., Any], case: Case, verb: str = "run") -> list[str]:
    """Follow the fixes of a command to the end, and return them; the last may be an action that keys can't express.

    What a shell can do is done. Each other way that a fix names is tried once, and must not meet the same error.
    """
    fixes: list[str] = []

    def said(one: Case) -> dict[str, str] | None:
        shutil.rmtree("runs", ignore_errors=True)
        done = here(*verb.split(), *filter(None, [one.preset]), *one.words)
        assert done.returncode in (0, 2), done.stderr
        return shown_error(done.stderr) if done.returncode else None

    error = said(case)
    while error is not None and len(fixes) < MAX_REFUSALS:
        fixes.append(error["fix"])
        commands = shell_commands(error["fix"])
        for command in commands:
            subprocess.run(command, shell=True, check=True)
        found = [case] if commands else list(ways(error, case))
        if not found:
            return fixes
        chosen, *others = found
        for other in others:
            again = said(other)
            assert again is None or again["error"] != error["error"], f"{other.command(verb)}\n{again}"
        again = said(chosen)
        assert again is None or again["error"] != error["error"], f"{chosen.command(verb)}\n{again}"
        case, error = chosen, again
    assert error is None, fixes
    return fixes


def shell_commands(fix: str) -> list[str]:
    """What a fix has a shell do, with the place that it leaves open filled in."""
    parts = re.split(r", then |, or |; |: ", fix.replace("<another file>", "utf-8.txt"))
    return [part for part in parts if part.split()[0] in SHELL]


def test_what_a_shell_does_is_read() -> None:
    assert shell_commands("rm 'a b': it is built again") == ["rm 'a b'"]
    assert shell_commands("cp a/x y, then data.tokenizer=y") == ["cp a/x y"]
    assert shell_commands("chmod u+r a, or a data.source without it") == ["chmod u+r a"]
    assert shell_commands("iconv -f UTF-16 -t UTF-8 a > <another file>") == ["iconv -f UTF-16 -t UTF-8 a > utf-8.txt"]
    assert shell_commands("train.steps=3 or remove train.lr") == []


OPEN = {
    "a conversation needs a tokenizer with a template": ("data.source=chats.jsonl", "data.tokenizer=<the folder"),
    "an array": ("data.source=array.jsonl data.text_field=body", "one object per line"),
    "UTF-16": ("data.source=utf-16.txt", "iconv -f UTF-16"),
    "Latin-1": ("data.source=latin-1.txt", "iconv -f <its encoding>"),
    "records in Latin-1": ("data.source=latin-1.jsonl data.text_field=body", "iconv -f <its encoding>"),
    "compressed Latin-1": ("data.source=packed.txt.gz", "gunzip -k packed.txt.gz, then iconv -f <its encoding>"),
    "an entry of a mixture": ("data.mixture=['1:texts/*.txt','1:lines.jsonl#bdy']", "in data.mixture, 1:lines.jsonl#"),
    "an entry without weight": ("data.mixture=['texts/*.txt','1:lines.jsonl#body']", "0.5:texts/*.txt"),
    "documents of a token file": ("data.source=ids.npy data.packing=documents", "data.separator=<"),
}
"""Words, and how the last fix begins, which leaves something to the reader."""
CASES = {
    "a missing file": "data.source=nope.txt",
    "a file of a similar name, with a space": "data.source='two wrds.jsonl' data.text_field=body",
    "a folder": "data.source=texts",
    "a folder with brackets and spaces": "data.source='ä [1] b'",
    "brackets in a glob": "data.source='ä [1] b/*.txt'",
    "a glob of nothing": "data.source='texts/*.md'",
    "no field": "data.source=lines.jsonl",
    "another field": "data.source=lines.jsonl data.text_field=bod",
    "a field with a space": "data.source=spaces.jsonl",
    "a field of numbers": "data.source=lines.jsonl data.text_field=number",
    "compressed records": "data.source=lines.jsonl.gz data.text_field=text",
    "records after a mark": "data.source=bom.jsonl",
    "a field of texts": "data.source='texts/*.txt' data.text_field=body",
    "a link to nowhere": "data.source='links/*.txt'",
    "a field after #": "data.source=lines.jsonl#body",
    "a mixture without a field": "data.mixture=\"['1:texts/*.txt','1:lines.jsonl']\"",
    "a mixture with a field too many": "data.mixture=\"['1:texts/*.txt','1:lines.jsonl#body']\" data.text_field=body",
    "a missing validation source": "data.source='texts/*.txt' data.validation_source=nope.txt",
    "conversations that aren't packed": f"{' '.join(FRAMED)} data.source=chats.jsonl data.chat_field=messages",
    "conversations by no key": f"{' '.join(FRAMED)} data.source=chats.jsonl",
    "a separator of bytes": "data.source='texts/*.txt' data.separator=3",
    "a missing tokenizer": "data.source='texts/*.txt' data.tokenizer=gpt2",
    "a small vocabulary": "data.source='texts/*.txt' data.tokenizer=chat model.vocab_size=100",
    "a long sequence": "data.source='texts/*.txt' train.seq_len=640000",
    "a prompt without a sample": "data.source='texts/*.txt' train.sample_prompt=def train.sample_tokens=0",
    "a long prompt": "data.source='texts/*.txt' train.sample_prompt='def one_step(x)' train.seq_len=8",
    "pictures for text": "data.source=digits",
    "an unknown key": "data.source='texts/*.txt' train.stpes=5",
    "an unknown section": "data.source='texts/*.txt' attention.kind=flex",
    "a foreign key": "data.source='texts/*.txt' train.max_steps=5",
    "a foreign option": "data.source='texts/*.txt' --gradient_accumulation_steps=2",
    "foreign epochs": "data.source='texts/*.txt' data.epochs=1",
    "heads that tp does not divide": "data.source='texts/*.txt' mesh.tp=3",
    "a batch that dp does not divide": "data.source='texts/*.txt' mesh.dp_shard=3",
    "a key of another family": "data.source='texts/*.txt' diffusion.schedule=linear",
}


@pytest.mark.parametrize("name", CASES)
def test_fixes_of_a_run_lead_to_its_start(here: Callable[..., Any], place: Path, name: str) -> None:
    case = Case("llama-tiny", ("data.cache_dir=cache", "train.seq_len=64", *shlex.split(CASES[name])))
    assert follow(here, case)


@pytest.mark.parametrize("name", OPEN)
def test_fixes_that_leave_something_open(here: Callable[..., Any], place: Path, name: str) -> None:
    words, last = OPEN[name]
    if "ids.npy" in words:
        import numpy

        numpy.save("ids.npy", numpy.arange(5000, dtype=numpy.uint16) % 256)
    case = Case("llama-tiny", ("data.cache_dir=cache", "train.seq_len=64", *words.split(" ")))
    if "iconv" in last:
        fix = shown_error(here("run", case.preset, *case.words).stderr)["fix"]
        assert fix.startswith(last)
        suffix = ".jsonl" if ".jsonl" in words else ".txt"
        for command in shell_commands(fix.replace("<its encoding>", "LATIN1")):
            subprocess.run(command.replace("utf-8.txt", f"utf-8{suffix}"), shell=True, check=True)
        case = case.with_words([f"data.source=utf-8{suffix}"])
        assert here("run", case.preset, *case.words).returncode == 0
    else:
        assert follow(here, case)[-1].startswith(last)


DATASETS = {
    "no column of Parquet": "data.source=table.parquet",
    "another column of Parquet": "data.source=table.parquet data.text_field=bdy",
    "a column of numbers": "data.source=table.parquet data.text_field=number",
    "no column of a saved dataset": "data.source=stored",
    "another column of a saved dataset": "data.source=stored data.text_field=bdy",
    "conversations of a saved dataset": "data.source=stored data.chat_field=body",
    "several saved datasets": "data.source=several data.text_field=body",
}


@pytest.mark.parametrize("name", DATASETS)
def test_fixes_of_datasets_lead_to_a_start(here: Callable[..., Any], place: Path, name: str) -> None:
    library = pytest.importorskip("datasets")
    library.disable_progress_bars()
    records = library.Dataset.from_json("lines.jsonl", cache_dir="json")
    records.to_parquet("table.parquet")
    records.save_to_disk("stored")
    library.DatasetDict({"train": records}).save_to_disk("several")
    case = Case("llama-tiny", ("data.cache_dir=cache", "train.seq_len=64", *shlex.split(DATASETS[name])))
    assert follow(here, case)


OTHERS = {
    "a preset": ("run", "llama-tinny", "data.source=texts/*.txt data.cache_dir=cache"),
    "pictures without digits": ("run", "dit-digits", "data.source=digit"),
    "videos": ("run", "dit-digits", "data.source=digits-video"),
    "channels": ("run", "dit-digits", "model.num_channels=2"),
    "an image that patches don't divide": ("run", "dit-digits", "model.image_size=15"),
    "an axis of no use": ("plan", "dit-digits", "mesh.cp=2"),
    "text of pictures": ("run", "dit-digits", "data.text_field=x"),
    "a preset of a plan": ("plan", "llama-tinny", ""),
    "a folder that has to be made": ("plan", "llama-tiny", "-o new/plan.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_fixes_of_other_commands(here: Callable[..., Any], place: Path, name: str) -> None:
    verb, preset, words = OTHERS[name]
    assert follow(here, Case(preset, tuple(words.split())), verb)


def common(*words: str) -> Case:
    """A run on texts, with these words; a mixture takes their place."""
    case = Case("llama-tiny", ("data.source=texts/*.txt", "data.cache_dir=cache", "train.seq_len=64"))
    return case.without(*["data.source="] * any(word.startswith("data.mixture=") for word in words)).with_words(words)


def saved(step: int, case: Case, *, folder: str = "old") -> Path:
    """A checkpoint of a run, with a manifest and no tensors."""
    config = load(case.preset, case.words)
    written = atomic_directory.begin(Path(folder, "checkpoints"), step)
    files = {"data": write_file(written / "data", b"x" * 1000)}
    corpus = open_data(config).fingerprint
    run = {"config": config.model_dump(mode="json"), "corpus": corpus, "skipped_in_a_row": 0}
    return atomic_directory.commit(written, step=step, model=dict(model_facts(config).identity), run=run, files=files)


RESUMED = {
    "a width": ("", "model.dim=64"),
    "positions": ("model.rope_scaling.factor=4.0", "model.rope_scaling.factor=2.0"),
    "no scaled positions": ("model.rope_scaling.factor=4.0", ""),
    "scaled positions": ("", "model.rope_scaling.factor=2.0"),
    "tied embeddings": ("", "model.tie_embeddings=true"),
    "an optimizer": ("", "train.optimizer=muon"),
    "a seed": ("train.seed=3", ""),
    "a batch": ("train.global_batch=8", ""),
    "packing": ("", "data.packing=documents"),
    "frozen parameters": ("train.freeze=embed*", ""),
    "frozen parameters by several globs": ("train.freeze=\"['embed*','blocks.0.*']\"", ""),
    "data": ("", "data.source=texts/a.txt"),
    "data with spaces": ("data.source='ä [[]1] b/*.txt'", ""),
    "a mixture": ("data.mixture=\"['1:texts/*.txt','1:lines.jsonl#body']\"", ""),
    "a tokenizer": ("", "data.tokenizer=chat model.vocab_size=320"),
}
"""Words of the run before, and words of the one that goes on."""


@pytest.mark.parametrize("name", RESUMED)
def test_fixes_of_a_resumed_run_continue_it(here: Callable[..., Any], place: Path, name: str) -> None:
    """On another mesh."""
    before, now = (common(*shlex.split(words)) for words in RESUMED[name])
    saved(3, before)
    assert follow(here, now.with_words(["mesh.dp_shard=2", "--out=old", "--resume=auto"]))


FOLDERS = {
    "a folder with a run": "--out=old",
    "a run folder as a checkpoint": "--resume=old",
    "an earlier checkpoint": "--resume=old/checkpoints/00000003",
    "a checkpoint elsewhere": "--out=mine --resume=old/checkpoints/00000006",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_fixes_of_run_folders_continue_a_run(here: Callable[..., Any], place: Path, name: str) -> None:
    for folder, steps in (("old", (3, 6)), ("mine", (3,))):
        for step in steps:
            saved(step, common(), folder=folder)
    assert follow(here, common(*FOLDERS[name].split()))
