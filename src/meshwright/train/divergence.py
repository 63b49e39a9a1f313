"""Errors for diverged runs that name the last good checkpoint.

A checkpoint is saved after its step's update, and only the next loss shows whether that update ruined the weights, so
the newest checkpoint of a diverging run may already be bad. A checkpoint is considered good once a later step or a
validation has produced a finite loss with its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.manifest import list_checkpoints, read_manifest
from meshwright.errors import CheckpointError, RunError, StoppedError, continue_command
from meshwright.train.run_folder import RunFolder

GENTLER = "a lower train.lr or a longer train.warmup_steps"


@dataclass(frozen=True)
class FiniteSteps:
    """Progress of a run up to its newest finite step."""

    step: int
    """Newest step whose weights produced a finite loss; checkpoints up to this step are good."""
    started: bool
    """True once this run has completed a finite step."""


def not_finite(what: str, *, where: str, rule: str, folder: RunFolder, finite: FiniteSteps) -> RunError:
    """Return the error for a non-finite loss or gradient, with instructions to resume from the last good checkpoint."""
    checkpoints = sorted(_steps(folder))
    good = [path for step, path in checkpoints if step <= finite.step]
    if not good:
        fix = f"a new run with another --out, {GENTLER if finite.started else _without_a_finite_step(folder)}"
        return RunError(f"{what}; no checkpoint is good", where=where, rule=rule, fix=fix)
    if good[-1] == checkpoints[-1][1] and good[-1].parent == folder.checkpoints:
        fix = f"{continue_command(folder.path)}, with {GENTLER}"
    else:
        fix = f"{_from(good[-1], folder)}, with {GENTLER}"
    return RunError(f"{what}; the last good checkpoint is {good[-1]}", where=where, rule=rule, fix=fix)


def stopped_unsaved(step: int, folder: RunFolder) -> StoppedError:
    """Return the error for a run that was stopped after a skipped step, naming the checkpoint to resume from."""
    ours = [path for _, path in sorted(_steps(folder)) if path.parent == folder.checkpoints]
    if ours:
        what, fix = f"the newest checkpoint is {ours[-1]}", continue_command(folder.path)
    elif folder.checkpoint is not None:
        what = f"the newest checkpoint is {folder.checkpoint}"
        fix = _from(folder.checkpoint, folder)
    else:
        what, fix = "there is no checkpoint", f"{continue_command(folder.path)}, which starts over"
    return StoppedError(
        f"stopped after step {step}, as requested; that step was not finite, so it was not saved: {what}",
        where=f"step {step}",
        rule="the weights of a skipped step are not saved: the run may be diverging from them",
        fix=fix,
    )


def _without_a_finite_step(folder: RunFolder) -> str:
    if folder.checkpoint is not None:
        return f"from another checkpoint: no step was finite with the weights of {folder.checkpoint}"
    return "with another model, precision or data: not even the first step was finite"


def _steps(folder: RunFolder) -> Iterator[tuple[int, Path]]:
    """Yield step and path of each checkpoint the run can resume from: its own and the one it started from."""
    paths = list_checkpoints(folder.checkpoints)
    if folder.checkpoint is not None and folder.checkpoint.parent != folder.checkpoints:
        paths.append(folder.checkpoint)
    for path in paths:
        try:
            yield read_manifest(path).step, path
        except CheckpointError:
            continue


def _from(checkpoint: Path, folder: RunFolder) -> str:
    """Return the command that goes on from a checkpoint in a new folder."""
    names = (folder.path.with_name(f"{folder.path.name}-from-{checkpoint.name}{end}") for end in ("", *range(2, 99)))
    new = next(path for path in names if not path.exists())
    return continue_command(folder.path, ["--resume", str(checkpoint), "--out", str(new)])
