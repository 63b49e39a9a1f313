"""The run folder: where a run writes, and which checkpoint it goes on from.

Torch-free, so that a folder in use or a checkpoint of another model is an error before any process starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import Manifest, check_model, list_checkpoints, newest_valid, read_manifest, verify
from meshwright.config.schema import RunConfig
from meshwright.errors import CheckpointError, InputError

AUTO = "auto"
RUNS = Path("runs")


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


def choose_folder(config: RunConfig, *, out: Path | None, resume: str | None) -> RunFolder:
    """Decide where a run writes and which checkpoint it starts from.

    Args:
        config: the run.
        out: the folder asked for; `runs/<name>-<n>` when None: a new one, or the newest one to resume.
        resume: None for a fresh run, `auto` for the newest valid checkpoint of the folder, or a checkpoint's path.

    Raises:
        InputError: the folder already holds a run and `resume` is None.
        CheckpointError: a checkpoint that is damaged, of another model, or of other data.
    """
    path = out if out is not None else _default_folder(config.name, resume)
    if resume is None:
        if (path / "metrics.jsonl").exists() or list_checkpoints(path / "checkpoints"):
            raise InputError(
                f"{path} already holds a run",
                where="--out",
                rule="a run never writes over another",
                fix="--resume auto to go on with it, or another --out",
            )
        return RunFolder(path, None)
    if resume != AUTO:
        checkpoint = Path(resume)
        check_continues(verify(checkpoint), config, checkpoint)
        return RunFolder(path, checkpoint, (f"resuming from {checkpoint}",))
    newest, passed_over = newest_valid(path / "checkpoints")
    notes = [f"passed over {bad}: {reason}" for bad, reason in passed_over]
    if newest is None:
        return RunFolder(path, None, (*notes, f"no valid checkpoint in {path / 'checkpoints'}: starting at step 0"))
    check_continues(read_manifest(newest), config, newest)
    return RunFolder(path, newest, (*notes, f"resuming from {newest}"))


def check_continues(manifest: Manifest, config: RunConfig, path: Path) -> None:
    """Check that `config` may go on from a checkpoint: same model, and same samples in the same order.

    Raises:
        CheckpointError: it is of another model, or a key that decides the samples differs.
    """
    check_model(manifest, config.model.spec().identity())
    saved: dict[str, Any] = manifest.run.get("config", {}).get("train", {})
    for key in ("seed", "seq_len", "global_batch"):
        now = getattr(config.train, key)
        if key in saved and saved[key] != now:
            raise CheckpointError(
                f"train.{key} = {now}, but the checkpoint was trained with {saved[key]}",
                where=str(path),
                rule="a resumed run sees the samples it would have seen: seed, seq_len and global_batch stay",
                fix=f"train.{key}={saved[key]}",
            )


def _default_folder(name: str, resume: str | None) -> Path:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    matches = (pattern.fullmatch(path.name) for path in RUNS.iterdir()) if RUNS.is_dir() else iter(())
    numbers = [int(match.group(1)) for match in matches if match]
    last = max(numbers, default=0)
    return RUNS / f"{name}-{last if resume and last else last + 1}"
