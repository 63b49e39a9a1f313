"""Where a run whose numbers stopped being finite can go back to, as errors that say it. Torch-free.

A checkpoint is saved after its step's update, and what the update has made of the weights only the next loss shows: of
a run that diverges, the newest checkpoint may be the one that the divergence starts from. So a checkpoint is called
good when a later step, or a validation, was finite on its weights.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.manifest import list_checkpoints, read_manifest
from meshwright.errors import CheckpointError, RunError
from meshwright.train.run_folder import RunFolder

GENTLER = "a lower train.lr or a longer train.warmup_steps"


@dataclass(frozen=True)
class Proven:
    """What a run's losses have shown of its checkpoints."""

    step: int
    """The newest step whose weights gave a finite loss; a checkpoint of an earlier one is good too."""
    started: bool
    """Whether this run had a finite step at all."""


def not_finite(what: str, *, where: str, rule: str, folder: RunFolder, proven: Proven) -> RunError:
    """That a run's numbers are not finite, with its last good checkpoint and how to go on from it."""
    found = sorted(_steps(folder))
    good = [path for step, path in found if step <= proven.step]
    if not good:
        fix = f"a new run with another --out, {GENTLER if proven.started else _without_a_finite_step(folder)}"
        return RunError(f"{what}; no checkpoint is good", where=where, rule=rule, fix=fix)
    if good[-1] == found[-1][1] and good[-1].parent == folder.checkpoints:
        fix = f"--out {_quoted(folder.path)} --resume auto with {GENTLER}"
    else:
        fix = f"--resume {_quoted(good[-1])} with another --out and {GENTLER}"
    return RunError(f"{what}; the last good checkpoint is {good[-1]}", where=where, rule=rule, fix=fix)


def stopped_unsaved(step: int, folder: RunFolder) -> RunError:
    """That a run was stopped after a step that was skipped, and what it goes on from."""
    ours = [path for _, path in sorted(_steps(folder)) if path.parent == folder.checkpoints]
    if ours:
        what, fix = f"the newest checkpoint is {ours[-1]}", f"--out {_quoted(folder.path)} --resume auto"
    elif folder.checkpoint is not None:
        what = f"the newest checkpoint is {folder.checkpoint}"
        fix = f"--resume {_quoted(folder.checkpoint)} with another --out"
    else:
        what, fix = "there is no checkpoint", f"--out {_quoted(folder.path)} --resume auto, which starts again"
    return RunError(
        f"stopped after step {step}, as asked; that step was not finite, so it was not saved: {what}",
        where=f"step {step}",
        rule="what a step that was skipped leaves is not saved: it may be what the run diverges from",
        fix=fix,
    )


def _without_a_finite_step(folder: RunFolder) -> str:
    if folder.checkpoint is not None:
        return f"from another checkpoint: no loss was finite with the weights of {folder.checkpoint}"
    return "with another model, precision or data: not even the first loss was finite"


def _steps(folder: RunFolder) -> Iterator[tuple[int, Path]]:
    """The checkpoints that the run can go back to, by step: its own, and the one it came from."""
    paths = list_checkpoints(folder.checkpoints)
    if folder.checkpoint is not None and folder.checkpoint.parent != folder.checkpoints:
        paths.append(folder.checkpoint)
    for path in paths:
        try:
            yield read_manifest(path).step, path
        except CheckpointError:
            continue


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
