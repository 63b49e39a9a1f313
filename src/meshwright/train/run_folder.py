"""The folder of a run: its files, what its checkpoints carry, the plans of earlier steps, and which checkpoint of a
diverged run is good.

A checkpoint is saved after its step's update, and only the next loss shows whether that update ruined the weights, so
the newest checkpoint of a diverging run may already be bad. A checkpoint is considered good once a later step or a
validation has produced a finite loss with its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path

from meshwright.checkpoint.manifest import list_checkpoints, read_manifest, read_sidecars
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.data.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_FILES, tokenizer_files
from meshwright.errors import CheckpointError, MeshwrightError, RunError, StoppedError, continue_command
from meshwright.plan.compare import differences
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import from_json
from meshwright.units import counted


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run and the checkpoint it starts from."""

    path: Path
    checkpoint: Path | None
    """Verified checkpoint to resume from, or None for a fresh start."""
    notes: tuple[str, ...] = ()
    """Messages for the user about how the checkpoint was chosen, such as damaged ones that were skipped."""

    @property
    def checkpoints(self) -> Path:
        """Path of the checkpoints folder."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Path of the metrics file."""
        return self.path / "metrics.jsonl"

    @property
    def plan(self) -> Path:
        """Path of the plan file."""
        return self.path / "plan.json"

    def done(self) -> int:
        """Return the step of the checkpoint to resume from; 0 for a fresh start, also from weights alone."""
        manifest = None if self.checkpoint is None else read_manifest(self.checkpoint)
        return 0 if manifest is None or "config" not in manifest.run else manifest.step

    def log(self, rank: int) -> Path:
        """Return the path of the file of what a rank logs."""
        return self.path / "logs" / f"rank-{rank}.log"


def files_to_carry(config: RunConfig, checkpoint: Path | None) -> dict[str, bytes]:
    """Return the sidecar files for a run's checkpoints: those of the checkpoint it starts from, its tokenizer's, and
    what its family needs for exports.

    Raises:
        CheckpointError: a file of the checkpoint cannot be read.
        DataError: a file of the tokenizer cannot be read.
    """
    kept = read_sidecars(read_manifest(checkpoint)) if checkpoint is not None else {}
    own = tokenizer_files(config.data.tokenizer)
    if TOKENIZER_CONFIG in own:  # all that the run reads: the kept template could be another
        kept = {name: kept[name] for name in kept if not any(fnmatchcase(name, glob) for glob in TOKENIZER_FILES)}
    return {**config.family.files_to_keep(run_facts(config)), **kept, **own}


def keep_other_plan(path: Path, plan: RunPlan, done: int) -> list[str]:
    """Rename the plan of the earlier steps if a resumed run uses a different one.

    Args:
        path: path of the folder's plan file, which may not exist.
        plan: plan of the resumed run.
        done: last completed step.

    Returns:
        Messages for the user.
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
        if earlier.mesh != plan.mesh:
            return [f"{_keep(path, done)} keeps the plan of the earlier steps, which had another layout"]
        what = f"which has {found[0].first} for {found[0].path}, where this one has {found[0].second}"
        what += f", and {counted(len(found) - 1, 'more difference')}" if found[1:] else ""
    return [f"the plan differs from that of the earlier steps, {what}; {_keep(path, done)} keeps that one, for --plan"]


def _keep(path: Path, done: int) -> str:
    """Rename the plan of the first `done` steps, and return its name."""
    names = (f"plan-to-{done:08d}{suffix}.json" for suffix in chain([""], (f"-{number}" for number in count(2))))
    kept = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(kept)
    return kept.name


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
