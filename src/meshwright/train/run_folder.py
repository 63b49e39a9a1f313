"""The run folder: where a run writes, and which checkpoint it goes on from.

Torch-free, so that a folder in use or a checkpoint of another model is an error before any process starts.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import Any

from meshwright.checkpoint.manifest import (
    Manifest,
    check_model,
    list_checkpoints,
    newest_complete,
    newest_valid,
    read_manifest,
    verify,
)
from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import CheckpointError, InputError, MeshwrightError
from meshwright.plan.compare import differences
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import from_json
from meshwright.settings.violation import format_fix
from meshwright.train.record.loss_curves import read_metrics
from meshwright.train.run_folder_lock import hold_folder

AUTO = "auto"
RUNS = Path("runs")

DECIDES_SAMPLES = {"train": ("seed", "seq_len", "global_batch")}
"""Keys, by section, that decide what a step trains on; families have more."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes and where it starts."""

    path: Path
    checkpoint: Path | None
    """The verified checkpoint it goes on from, or None for a fresh start."""
    notes: tuple[str, ...] = ()
    """What a person should know of the choice, such as checkpoints passed over."""

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.path / "metrics.jsonl"

    @property
    def plan(self) -> Path:
        """The file of the plan."""
        return self.path / "plan.json"


def choose_folder(
    config: RunConfig, *, out: Path | None, resume: str | None, corpus: str, hold: ExitStack
) -> RunFolder:
    """Decide where a run writes and which checkpoint it starts from, and make the folder.

    Args:
        config: the run.
        out: the folder asked for. When None: a new `runs/<name>-<n>`; to resume, the newest of these or the folder
            of the checkpoint named.
        resume: None for a fresh run, `auto` for the newest valid checkpoint of the folder, or a checkpoint's path.
        corpus: fingerprint of what the run trains on.
        hold: keeps other runs out of the folder until it is closed.

    Raises:
        InputError: the folder holds another run, is being written by one, can't be written, or has a damaged record.
        CheckpointError: a checkpoint that is damaged, of another model, or of other data.
    """
    if resume is None:
        path = _take(out or _new_folder(config.name), hold)
        _check_unused(path)
        return RunFolder(path, None)
    if resume != AUTO:
        return _from_checkpoint(config, Path(resume), out=out, corpus=corpus, hold=hold)
    path = _take(out or _last_folder(config.name) or _new_folder(config.name), hold)
    _check_record(path)
    newest, passed_over = newest_valid(path / "checkpoints")
    notes = [f"passed over {bad}: {reason}" for bad, reason in passed_over]
    if newest is None:
        _check_none_lost(path, passed_over)
        return RunFolder(path, None, (f"no checkpoint in {path / 'checkpoints'}: starting at step 0",))
    check_continues(read_manifest(newest), config, newest, corpus)
    return RunFolder(path, newest, (*notes, f"resuming from {newest}"))


def _from_checkpoint(
    config: RunConfig, checkpoint: Path, *, out: Path | None, corpus: str, hold: ExitStack
) -> RunFolder:
    inside = list_checkpoints(checkpoint / "checkpoints")
    if inside and not (checkpoint / "manifest.json").exists():
        raise CheckpointError(
            f"{checkpoint} is a run folder, not a checkpoint",
            where="--resume",
            rule="--resume takes auto, which looks into --out, or one checkpoint",
            fix=f"--out {quote(str(checkpoint))} --resume auto, or --resume {quote(str(inside[-1]))}",
        )
    check_continues(verify(checkpoint), config, checkpoint, corpus)
    home = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None
    path = _take(out or home or _new_folder(config.name), hold)
    if home is None or path.resolve() != home.resolve():
        _check_unused(path)
    elif (newest := newest_complete(checkpoint.parent)) and newest.name != checkpoint.name:
        raise InputError(
            f"{path} has gone on to {newest.name} after {checkpoint.name}",
            where="--resume",
            rule="a run folder holds one run: what came after its checkpoint is not written over",
            fix=f"a new --out, or --out {quote(str(path))} --resume auto",
        )
    _check_record(path)
    return RunFolder(path, checkpoint, (f"resuming from {checkpoint}",))


def keep_other_plan(path: Path, plan: RunPlan, done: int) -> list[str]:
    """Before a run that goes on writes its plan: rename that of the steps so far, if it is another one.

    Args:
        path: of the folder's plan, which may not be there.
        plan: of the run from here on.
        done: the last step done.

    Returns:
        What a person should know of it.
    """
    try:
        earlier = from_json(path.read_text("utf-8"), where=str(path))
    except FileNotFoundError:
        return []
    except (MeshwrightError, UnicodeDecodeError) as error:
        what = f"which this version can't read ({error})"
    else:
        found = differences(earlier, plan)
        if not found:
            return []
        what = f"which has {found[0].first} for {found[0].path}, where this one has {found[0].second}"
        what += f", and {len(found) - 1} more that differ" if found[1:] else ""
    names = (f"plan-to-{done:08d}{suffix}.json" for suffix in chain([""], (f"-{number}" for number in count(2))))
    kept = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(kept)
    return [f"the plan is not that of the steps so far, {what}; {kept.name} keeps it, and --plan goes on with it"]


def _check_unused(path: Path) -> None:
    if (path / "metrics.jsonl").exists() or list_checkpoints(path / "checkpoints"):
        raise InputError(
            f"{path} already holds a run",
            where="--out",
            rule="a run never writes over another",
            fix=f"--out {quote(str(path))} --resume auto to go on with it, or another --out",
        )


def _check_record(path: Path) -> None:
    """A run goes on in its record: what can't be read is said before any process starts."""
    metrics = path / "metrics.jsonl"
    for _ in read_metrics(metrics) if metrics.exists() else ():
        pass


def _check_none_lost(path: Path, passed_over: Sequence[tuple[Path, str]]) -> None:
    if passed_over:
        newest, reason = passed_over[0]
        raise CheckpointError(
            f"none of the checkpoints of {path} is valid ({len(passed_over)}); of the newest, {reason}",
            where=str(newest),
            rule="--resume auto starts at step 0 only where there is no checkpoint: it would write over the record",
            fix="restore a copy of a checkpoint; or start again with another --out",
        )


def _take(path: Path, hold: ExitStack) -> Path:
    """The folder, which exists now, can be written to, and is this run's alone."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Asked of the disk: permission bits say nothing of read-only mounts, nor to root.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _not_writable(path, error) from None
    hold_folder(path, hold)
    return path


def _not_writable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"{path} can't be written: {error.strerror or error}",
        where="--out",
        rule="a run writes its metrics and checkpoints into a folder",
        fix="--out with another folder",
    )


def check_continues(manifest: Manifest, config: RunConfig, path: Path, corpus: str) -> None:
    """Check that `config` may go on from a checkpoint: same model, same samples, and state of all that is trained.

    A checkpoint without a configuration holds weights only, which start a run of their own.

    Raises:
        CheckpointError: it is of another model, a key that decides the samples differs, or what was frozen is trained.
    """
    check_model(manifest, model_facts(config).identity)
    saved: dict[str, Any] = manifest.run.get("config", {})
    decides = {**DECIDES_SAMPLES, **config.family.decides_samples}
    for section, key in ((section, key) for section, keys in decides.items() for key in keys):
        now = getattr(getattr(config, section), key)
        before = saved.get(section, {}).get(key, now)
        if before != now:
            raise CheckpointError(
                f"{section}.{key} = {now}, but the checkpoint was trained with {before}",
                where=str(path),
                rule=f"a resumed run sees the samples it would have seen: {', '.join(decides[section])} stay",
                fix=f"{section}.{key}={before}",
            )
    _check_frozen(saved.get("train", {}).get("freeze", ()), config, path)
    if manifest.run.get("corpus", corpus) != corpus:
        raise CheckpointError(
            "the checkpoint was trained on another corpus",
            where=f"data.source = {config.data.source}; {path}",
            rule="a resumed run sees the samples it would have seen",
            fix="the files and the Python version of the first run; or a new run, with another --out",
        )


def _check_frozen(before: Sequence[str], config: RunConfig, path: Path) -> None:
    """A checkpoint has no optimizer state of what was frozen, so that stays frozen."""
    names = model_facts(config).parameter_names()

    def matching(globs: Sequence[str]) -> list[str]:
        return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]

    still = matching(config.train.freeze)
    thawed = next((name for name in matching(before) if name not in still), None)
    if thawed is not None:
        raise CheckpointError(
            f"{thawed} is trained now, but was frozen when the checkpoint was saved",
            where=f"train.freeze; {path}",
            rule="a resumed run has the optimizer state of all that it trains, and there is none of what was frozen",
            fix=format_fix({"train.freeze": before}),
        )


def _numbers(name: str) -> list[int]:
    """Of the folders `runs/<name>-<n>`."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    matches = (pattern.fullmatch(path.name) for path in RUNS.iterdir()) if RUNS.is_dir() else iter(())
    return [int(match.group(1)) for match in matches if match]


def _new_folder(name: str) -> Path:
    """Made here, so that of runs that start at once each has its own."""
    while True:
        path = RUNS / f"{name}-{max(_numbers(name), default=0) + 1}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise
        except OSError as error:
            raise _not_writable(path, error) from None
        else:
            return path


def _last_folder(name: str) -> Path | None:
    numbers = _numbers(name)
    return RUNS / f"{name}-{max(numbers)}" if numbers else None
