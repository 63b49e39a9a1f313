"""Commands of Meshwright as a part's cases start them, and what a run of `meshwright run` left. Torch-free.

A run is known by its words: parts that want the same run, of one call, read the folder that the first of them left.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import Any

import numpy as np

from meshwright.config.facts_for_family import model_facts
from meshwright.config.resolve import profiled_steps
from meshwright.config.schema import RunConfig
from meshwright.plan.rules import load
from meshwright.train.record.record_files import loss_key, read_events, read_metrics
from meshwright_bench.gpu.cases import CaseError, Setting, with_cause

LOG = logging.getLogger(__name__)

NOTHING_KEPT = ("checkpoint.at_end=false",)
"""Benchmarks write nothing that nobody asked for."""
WARMUP_STEPS = 3
"""First steps of a run, which compile and allocate; their time is not measured."""
SEED = 0


@dataclass(frozen=True)
class RunRecord:
    """Values that a run left, from which figures are made."""

    config: RunConfig
    folder: Path
    losses: tuple[float, ...]
    step_s: float
    """Median seconds of the steps after the first `WARMUP_STEPS` that nothing was recorded or measured in."""
    peak_bytes: int
    predicted_bytes: int
    start_s: Mapping[str, float]
    """Seconds of each phase of the start, up to the first step, as far as the run records them."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch * self.config.train.seq_len

    @property
    def flops(self) -> float:
        """FLOPs of a step, forward and backward."""
        return self.tokens * model_facts(self.config).flops_per_token


def run_command(label: str, *words: str) -> list[str]:
    """Run `python WORDS`, and return the lines of its output, errors among them; they are logged as they come.

    Raises:
        CaseError: it failed; with the line of its output that says why.
    """
    LOG.info("[%s] $ python %s", label, " ".join(words))
    lines = []
    command = [sys.executable, *words]
    with Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            LOG.info("[%s] %s", label, line.rstrip())
    if process.returncode:
        raise CaseError(f"exit status {process.returncode}: {reason(lines)}")
    return lines


def reason(lines: Sequence[str]) -> str:
    """Return the line that says why a command failed: the first error that it shows, with its cause, else its last."""
    said = [line for line in lines if line]
    first = next((at for at, line in enumerate(said) if line.startswith(("error", "✗"))), len(said) - 1)
    return with_cause(said[first:]) if said else "it printed nothing"


def run_words(words: Sequence[str], setting: Setting) -> list[str]:
    """Return the words of `meshwright run` for `words` on the setting's device, keeping nothing at the end."""
    return [*words, *device_words(setting), *NOTHING_KEPT]


def device_words(setting: Setting) -> tuple[str, ...]:
    """Return the words of a run or a proof on the setting's device; threads of two busy cores wait for each other."""
    return (f"train.device={setting.device}", *(("train.threads=1",) if setting.is_dry else ()))


def measured_run(label: str, words: Sequence[str], setting: Setting) -> RunRecord:
    """Return what the run of these words left, after running it, unless a part of this call has.

    Raises:
        CaseError: the run failed.
    """
    words = run_words(words, setting)
    name = hashlib.sha256("\0".join(words).encode("utf-8")).hexdigest()[:12]
    folder = setting.scratch / "runs" / name
    if not (folder / "passed").is_file():
        run_command(label, "-m", "meshwright", "run", *words, "--out", str(folder))
        (folder / "passed").touch()
    return read_run(config_of(words), folder)


def config_of(words: Sequence[str]) -> RunConfig:
    """Return the configuration that words of a command give: a preset, if the first is one, and overrides.

    Raises:
        InputError: they are wrong.
    """
    return load(None, words) if "=" in words[0] else load(words[0], words[1:])


def read_run(config: RunConfig, folder: Path) -> RunRecord:
    """Read what a run left in its folder."""
    lines = list(read_metrics(folder / "metrics.jsonl"))
    events: dict[str, dict[str, Any]] = {event["event"]: event for event in read_events(folder)}
    disturbed = {*events["measured"]["steps"], *(step for steps in profiled_steps(config.train) for step in steps)}
    tokens = config.train.global_batch * config.train.seq_len
    timed = [line for line in lines if line["step"] > WARMUP_STEPS and line["step"] not in disturbed] or lines[-1:]
    return RunRecord(
        config,
        folder,
        losses=tuple(line[loss_key(line)] for line in lines),
        step_s=median(tokens / line["tokens_per_s"] for line in timed),
        peak_bytes=events["measured"]["memory"][0]["peak"],
        predicted_bytes=events["start"]["predicted_bytes"],
        start_s=events.get("under way", {}).get("ranks", [{}])[0],
    )


def random_tokens(setting: Setting, *, vocab_size: int, count: int) -> Path:
    """Return a file of random token ids, which every side of a comparison reads; written once."""
    path = setting.scratch / f"tokens-{vocab_size}-{count}.npy"
    if not path.is_file():
        generator = np.random.default_rng(SEED)
        unfinished = path.with_suffix(".part.npy")
        np.save(unfinished, generator.integers(vocab_size, size=count, dtype=np.uint32))
        unfinished.replace(path)
    return path
