"""What tests of several rooms share: small corpora, the real command, and reading the errors it shows. Torch-free."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pytest

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import MeshwrightError
from meshwright.models.dit.description import UNUSED_KEYS
from meshwright.plan.rules import load
from meshwright.train.launch.rank_context import RankContext, StatusBoard

SMALL = ("model.num_layers=2", "train.global_batch=8", "train.seq_len=64", "train.validation_samples=16",
         "train.sample_tokens=8", "train.threads=1")  # fmt: skip
"""A run of the default preset that takes milliseconds a step."""

SCREEN_LINES, SCREEN_COLUMNS = 24, 80

Case = TypeVar("Case", bound=tuple[Any, ...])


def small_corpus(folder: Path, *, num_bytes: int = 60_000) -> list[str]:
    """Write a text file into `folder`, and give the words that train on it."""
    folder.mkdir(parents=True, exist_ok=True)
    line = "def step_{n}(x):\n    return x * {n} + {m}\n"
    text = "".join(line.format(n=n, m=n * 7919 % 1000) for n in range(num_bytes // 34))
    (folder / "corpus.txt").write_text(text, "utf-8")
    return [f"data.source={folder}/*.txt"]


def for_pictures(words: Iterable[str]) -> list[str]:
    """Words of a run without those that are for text."""
    return [word for word in words if word.partition("=")[0] not in UNUSED_KEYS]


def open_data(config: RunConfig) -> Any:
    """What a run trains on."""
    return config.family.open_data(run_facts(config))


def rank_context(rank: int = 0, world_size: int = 1) -> RankContext:
    """The context of a rank on one machine, whose status nobody reads."""
    return RankContext(rank, world_size, rank, world_size, None, StatusBoard([0] * StatusBoard.length(world_size)))


def quick_and_slow(cases: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """All of `cases` as parameters of a test; those that are not in `quick` are marked slow."""
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def covering_pairs(cases: Iterable[Case], first: Collection[Case] = ()) -> list[Case]:
    """Few of `cases` that have every pair of values which some case has together; those in `first` among them.

    For products of factors of which no three are likely to interact. The cases keep their order. Always the same ones:
    each time one that adds most pairs, and of these the earliest whose values were taken least.
    """
    cases = list(cases)
    assert set(first) <= set(cases)
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    chosen: list[Case] = []
    missing: set[Any] = set().union(*pairs.values())
    taken: Counter[tuple[int, Any]] = Counter()

    def adds(case: Case) -> tuple[int, int]:
        return len(pairs[case] & missing), -sum(taken[value] for value in enumerate(case))

    waiting = [case for case in cases if case in first]
    while missing or waiting:
        case = waiting.pop(0) if waiting else max(cases, key=adds)
        chosen.append(case)
        missing -= pairs[case]
        taken.update(enumerate(case))
    return [case for case in cases if case in chosen]


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment, without what a launcher or a terminal may have left in it."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR",
               "COLUMNS")  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("SLURM_")}
    return kept | changes


def meshwright(
    *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run the real command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *map(str, words)],
        env=dict(env if env is not None else clean_environment()),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def shown_error(stderr: str) -> dict[str, str]:
    """The parts of the error that a command showed, which is all it showed and fits one screen."""
    lines = stderr.splitlines()
    assert "Traceback" not in stderr, stderr
    rows = sum(-(-len(line) // SCREEN_COLUMNS) for line in lines)  # as a terminal wraps them
    assert lines and rows <= SCREEN_LINES, stderr
    parts: dict[str, str] = {}
    label = ""
    for line in lines:
        found = re.match(r"(error|where|rule|fix) +(\S.*)", line)
        if found:
            label = found[1]
            assert label not in parts, f"two errors:\n{stderr}"
            parts[label] = found[2]
        else:
            assert label, f"something before the error:\n{stderr}"
            parts[label] += "\n" + line
    assert list(parts) == ["error", "where", "rule", "fix"], stderr
    return parts


WORD = re.compile(r"""(?:"[a-z_0-9.]+=[^"]*"|[a-z_0-9.]+=(?:'[^']*'|"[^"]*"|[^\s'"])+)""")
"""An override in a fix, as one types it: its value may be quoted, or the whole."""


def alternatives(fix: str) -> list[list[str]]:
    """The `key=value` words of each way out that a fix names, as a shell hands them on; words of one way stand side by
    side."""
    ways = (WORD.findall(way) for way in re.split(r",? or |; ", fix))
    return [[shlex.split(word.rstrip(",;"))[0] for word in words] for words in ways if words]


def outcome(
    words: Sequence[str], source: str | None = None, *, num_ranks: int | None = None
) -> RunConfig | MeshwrightError:
    """What loading gives: a configuration, or the error."""
    try:
        return load(source, words, num_ranks=num_ranks)
    except MeshwrightError as error:
        return error


def assert_every_fix_works(
    error: MeshwrightError, words: Sequence[str], source: str | None = None, *, num_ranks: int | None = None
) -> None:
    """Each way out that the error's fix names makes the same command valid."""
    assert error.what and error.where and error.rule and error.fix, error
    ways = alternatives(error.fix)
    assert ways, f"no key=value in the fix: {error.fix}"
    for way in ways:
        result = outcome([*words, *way], source, num_ranks=num_ranks)
        assert isinstance(result, RunConfig), f"{words} said: {error}\n\nand with {way}: {result}"


def run_folder(
    folder: Path, losses: Sequence[float | None], config: str, *, key: str = "loss_bits_per_byte", cut: str = ""
) -> Path:
    """What a run leaves of its losses in a folder, validated at the last step; `cut` is what a kill left of a line."""
    folder.mkdir()
    lines: list[dict[str, Any]] = [{"step": step, key: loss} for step, loss in enumerate(losses, start=1)]
    lines[-1][f"validation_{key}"] = 7.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    (folder / "config.toml").write_text(config)
    return folder
