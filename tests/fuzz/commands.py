"""Run a case as the command does, in forked processes, and read what came out."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np

from tests.data.chats.formats import CHATML, build, chat
from tests.forked_command import forked_meshwright
from tests.fuzz.case import Case
from tests.helpers import shown_error, small_corpus

TIMEOUT_S = 400.0
"""Limit of one command: far beyond train.timeout_s, after which a run that hangs ends by itself."""
MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 384,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2,
}  # fmt: skip


class Status(StrEnum):
    """How a command ended."""

    DONE = "done"
    REFUSED = "refused"
    CRASHED = "crashed"
    HUNG = "hung"
    NOT_PROVED = "not proved"


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it left."""

    status: Status
    text: str = ""
    """End of what it printed, if that is no refusal."""
    error: Mapping[str, str] = field(default_factory=dict)
    """Parts of a refusal: error, where, rule and fix."""
    metrics: tuple[Mapping[str, float], ...] = ()
    """Losses and gradient norms by name, of each step."""


Run = Callable[[str, Case], Outcome]
"""Runs a verb with a case's words."""


class Commands:
    """Runs cases in a folder with the files that they name."""

    def __init__(self, folder: Path, proves: Sequence[str] = ("--steps", "2")) -> None:
        self.folder, self._options = folder, {"run": ("--out", "run"), "prove": tuple(proves)}
        write_files(folder)

    def __call__(self, verb: str, case: Case) -> Outcome:
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        try:
            done = forked_meshwright(
                verb, case.preset, *case.words, *self._options.get(verb, ()), cwd=self.folder, timeout_s=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return Outcome(Status.HUNG, f"no end within {TIMEOUT_S:.0f} s")
        return read_outcome(done, out / "metrics.jsonl")


def read_outcome(done: subprocess.CompletedProcess[str], metrics: Path) -> Outcome:
    """Read how a command ended from what it printed and left."""
    text = "\n".join([*done.stdout.splitlines()[-25:], *done.stderr.splitlines()[-25:]])
    if done.returncode == 2:
        try:
            return Outcome(Status.REFUSED, error=shown_error(done.stderr))
        except AssertionError:
            return Outcome(Status.CRASHED, text)
    if "NOT PROVED" in done.stdout:
        return Outcome(Status.NOT_PROVED, text)
    if done.returncode != 0 or "Traceback" in done.stderr:
        return Outcome(Status.HUNG if "timed out" in done.stderr else Status.CRASHED, text)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return Outcome(Status.DONE, text, metrics=tuple(map(_numbers, lines)))


def _numbers(line: Mapping[str, float]) -> Mapping[str, float]:
    return {name: value for name, value in line.items() if "loss" in name or name == "grad_norm"}


def write_files(folder: Path) -> None:
    """Write texts, records, tokens, conversations with a tokenizer, and a model's configuration; always the same."""
    small_corpus(folder / "text", num_bytes=40_000)
    whole = (folder / "text" / "corpus.txt").read_text("utf-8")
    (folder / "text" / "0.txt").write_text(whole[:9_000], "utf-8")
    (folder / "held.txt").write_text(whole[::-1][:9_000], "utf-8")
    documents = [one for one in whole.split("def ") if one]
    _write_lines(folder / "lines.jsonl", [{"text": f"def {one}"} for one in documents])
    turns = [(f"What is two and {n}?", f"It is {n + 2}. The quick fox.") for n in range(400)]
    _write_lines(folder / "chats.jsonl", [{"messages": chat(*turn)} for turn in turns])
    build(folder / "tokenizer", CHATML)
    ids = np.frombuffer(whole.encode(), np.uint8).astype(np.uint16)
    ids[::97] = 0
    np.save(folder / "tokens.npy", ids)
    ids.tofile(folder / "tokens.bin")
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))


def _write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
