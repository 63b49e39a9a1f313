"""Choose the folder of a run and the checkpoint that it resumes from, before any process starts.

A folder in use or another model's checkpoint is rejected before any process starts.

A lock keeps two runs from writing to the same folder. It is held on a file that names its holder and is removed on
release. The kernel drops the lock when the process ends, so a file left behind by a killed run is not locked. On file
systems without locks, a run warns and continues.
"""

from __future__ import annotations

import fcntl
import io
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from errno import EISDIR
from fnmatch import fnmatchcase
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
    sidecar_path,
    verify,
)
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import MeshConfig, RunConfig
from meshwright.config.source import CONFIG_FILE
from meshwright.data.token_files import is_token_file
from meshwright.data.tokenizer import tokenizer_identity
from meshwright.data.tokenizer_files import BYTES, NONE, TOKENIZER
from meshwright.errors import CheckpointError, InputError, continue_command
from meshwright.log import get_logger
from meshwright.models.tasks.text_sources import SOURCE_KEYS, all_sources, changes
from meshwright.optim.catalogue import KEY as OPTIMIZER
from meshwright.optim.catalogue import OTHERS
from meshwright.settings.violation import format_fix, format_value
from meshwright.train.continued_run import AUTO, RUNS, changed_keys, folder_numbers, last_folder
from meshwright.train.record.record_files import read_metrics
from meshwright.train.run_folder import RunFolder

FILES = (CONFIG_FILE, "metrics.jsonl", "plan.json", "loss.png", "events.jsonl", "report.html")
"""Files that every run writes into its folder, beside the folder of checkpoints."""

IMPORTED = "huggingface"
"""Folder of an imported run with the tokenizer and configuration of the model, beside the folder of checkpoints."""

DECIDES_SAMPLES = {"train": ("seed", "seq_len", "global_batch"), "data": ("packing", "separator")}
"""Keys, by section, that determine a step's samples; model families add their own."""


def choose_folder(
    config: RunConfig, *, out: Path | None, resume: str | None, corpus: str, hold: ExitStack
) -> RunFolder:
    """Choose the folder of a run and the checkpoint it starts from, and create the folder.

    Args:
        config: the run.
        out: the requested folder. If None, a fresh run gets a new `runs/<name>-<n>`; a resumed one uses the newest of
            these or the folder of the given checkpoint.
        resume: None for a fresh run, `auto` for the newest valid checkpoint in the folder, or a checkpoint's path.
        corpus: fingerprint of the training data.
        hold: exit stack that releases the folder's lock when closed.

    Raises:
        InputError: the folder holds another run, is in use, is not writable, or contains damaged metrics.
        CheckpointError: the checkpoint is damaged, or belongs to another model or other data.
    """
    if resume is None:
        path = _take(out or _new_folder(config.name), hold)
        _check_unused(path)
        return RunFolder(path, None)
    if resume != AUTO:
        return _from_checkpoint(config, Path(resume), out=out, corpus=corpus, hold=hold)
    path = _take(out or last_folder(config.name) or _new_folder(config.name), hold)
    _check_record(path)
    newest, skipped = newest_valid(path / "checkpoints")
    notes = [f"skipped {bad}: {reason}" for bad, reason in skipped]
    if newest is None:
        _check_none_lost(path, skipped)
        return RunFolder(path, None, (f"no checkpoint in {path / 'checkpoints'}: starting at step 0",))
    manifest = read_manifest(newest)
    check_continues(manifest, config, newest, corpus)
    return RunFolder(path, newest, (*notes, f"resuming from {newest}", *_changed(manifest, config)))


def _from_checkpoint(
    config: RunConfig, checkpoint: Path, *, out: Path | None, corpus: str, hold: ExitStack
) -> RunFolder:
    if (checkpoint / "config.json").is_file() and next(checkpoint.glob("*.safetensors"), None):
        raise CheckpointError(
            f"{checkpoint} holds weights in Hugging Face's format, not a checkpoint of a run",
            where="--resume",
            rule="--resume takes auto, which searches --out, or the path of one checkpoint",
            fix=f"meshwright checkpoint import {quote(str(checkpoint))} runs/imported, then "
            f"{continue_command(Path('runs/imported'))}",
        )
    inside = list_checkpoints(checkpoint / "checkpoints")
    if inside and not (checkpoint / "manifest.json").exists():
        raise CheckpointError(
            f"{checkpoint} is a run folder, not a checkpoint",
            where="--resume",
            rule="--resume takes auto, which searches --out, or the path of one checkpoint",
            fix=f"{continue_command(checkpoint)}, or --resume {quote(str(inside[-1]))}",
        )
    manifest = verify(checkpoint)
    check_continues(manifest, config, checkpoint, corpus)
    home = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None
    path = _take(out or home or _new_folder(config.name), hold)
    if home is None or path.resolve() != home.resolve():
        _check_unused(path)
    elif (newest := newest_complete(checkpoint.parent)) and newest.name != checkpoint.name:
        raise InputError(
            f"{path} already has {newest.name}, which is newer than {checkpoint.name}",
            where="--resume",
            rule="a run folder holds one run: later checkpoints are not overwritten",
            fix=f"a new --out; or {continue_command(path)}, from its newest checkpoint",
        )
    _check_record(path)
    return RunFolder(path, checkpoint, (f"resuming from {checkpoint}", *_changed(manifest, config)))


def _changed(manifest: Manifest, config: RunConfig) -> list[str]:
    """Return notes of the layout and the keys that are others than in the run so far."""
    saved = manifest.run.get("config", {})
    found = changed_keys(saved, config)
    listed = [
        f"{k} {format_value(before)} → {format_value(now)}" for k, before, now in found if not k.startswith("mesh.")
    ]
    notes = [f"changed since step {manifest.step}: {', '.join(listed)}"] if listed else []
    if len(listed) < len(found):
        notes.append(f"layout: {MeshConfig.model_validate(saved['mesh']).layout()} → {config.mesh.layout()}")
    return notes


def _check_unused(path: Path) -> None:
    if (path / "metrics.jsonl").exists() or list_checkpoints(path / "checkpoints"):
        raise InputError(
            f"{path} already holds a run",
            where="--out",
            rule="a run never overwrites another",
            fix=f"{continue_command(path)}, which continues it; or another --out",
        )


def _check_record(path: Path) -> None:
    """Read the metrics file that the run will append to, so that damage is reported before any process starts."""
    metrics = path / "metrics.jsonl"
    for _ in read_metrics(metrics) if metrics.exists() else ():
        pass


def _check_none_lost(path: Path, skipped: Sequence[tuple[Path, str]]) -> None:
    if skipped:
        newest, reason = skipped[0]
        raise CheckpointError(
            f"none of the checkpoints of {path} is valid ({len(skipped)}); of the newest, {reason}",
            where=str(newest),
            rule="--resume auto starts at step 0 only where there is no checkpoint: it would overwrite the metrics",
            fix="restore a copy of a checkpoint; or start again with another --out",
        )


def _take(path: Path, hold: ExitStack) -> Path:
    """Create the folder if needed, check that it is writable, and lock it."""
    _try_to_write(path)
    if (checkpoints := path / "checkpoints").exists():
        _try_to_write(checkpoints)
    if (file := next((path / name for name in FILES if (path / name).is_dir()), None)) is not None:
        raise _not_writable(file, IsADirectoryError(EISDIR, os.strerror(EISDIR)))
    hold_folder(path, hold)
    return path


def _try_to_write(folder: Path) -> None:
    """Create the folder if needed, and a file in it: permission bits say nothing of read-only mounts, or to root."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from None


def _not_writable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"can't write to {path}: {error.strerror or error}",
        where="--out",
        rule="a run writes its metrics and checkpoints into a folder",
        fix="--out with another folder",
    )


def check_continues(manifest: Manifest, config: RunConfig, path: Path, corpus: str) -> None:
    """Check that `config` can resume from a checkpoint: same model, same samples, state for all trained parameters.

    A checkpoint without a configuration contains only weights, from which any run may start.

    Raises:
        CheckpointError: the model, the tokenizer or a key that determines the samples differs, or a frozen parameter
            is now trained.
    """
    sections = {name: section.model_dump() for name, section in config.family_sections().items()}
    saved: dict[str, Any] = manifest.run.get("config", {})
    is_other_corpus = manifest.run.get("corpus", corpus) != corpus
    if is_other_corpus and saved.get("data", {}).get("tokenizer", config.data.tokenizer) != config.data.tokenizer:
        # First, since the model's vocabulary is that of its tokenizer: by itself, neither size would do.
        _check_tokenizer(manifest, config, path)
        raise _other_corpus(saved["data"], config, path)
    check_model(manifest, model_facts(config).identity, sections)
    _check_tokenizer(manifest, config, path)
    decides = {**DECIDES_SAMPLES, **config.family.decides_samples}
    for section, key in ((section, key) for section, keys in decides.items() for key in keys):
        now = getattr(getattr(config, section), key)
        before = saved.get(section, {}).get(key, now)
        if before != now:
            raise CheckpointError(
                f"{section}.{key} = {now}, but the checkpoint was trained with {before}",
                where=str(path),
                rule=f"a resumed run sees the same samples: {', '.join(decides[section])} can't change",
                fix=format_fix({f"{section}.{key}": before}),
            )
    _check_frozen(saved.get("train", {}).get("freeze", ()), config, path)
    before = saved.get("train", {}).get("optimizer", OTHERS if saved else config.train.optimizer)
    if before != config.train.optimizer:
        raise CheckpointError(
            f"{OPTIMIZER} = {config.train.optimizer}, but the checkpoint was trained with {before}",
            where=str(path),
            rule="a resumed run continues with the optimizer whose states the checkpoint has",
            fix=format_fix({OPTIMIZER: before}),
        )
    if is_other_corpus:
        raise _other_corpus(saved.get("data", {}), config, path)


def _other_corpus(saved: Mapping[str, Any], config: RunConfig, path: Path) -> CheckpointError:
    """Return the error for a checkpoint of other data; `saved` is the data section of its configuration."""
    now = config.data.model_dump(mode="json")
    if config.data.tokenizer != BYTES:
        saved = {"bos": NONE, **saved}  # earlier versions added no beginning
    differences = changes(saved, now)
    names = [key.partition(".")[2] for key in SOURCE_KEYS]
    before = {f"data.{name}": saved[name] for name in names if name in saved and saved[name] != now[name]}
    files = "the files and the Python version of the first run"
    return CheckpointError(
        "the checkpoint was trained on another corpus" + (": " + "; ".join(differences) if differences else ""),
        where=f"data.mixture; {path}" if config.data.mixture else f"data.source = {config.data.source}; {path}",
        rule="a resumed run sees the same samples",
        fix=f"{format_fix(before) if differences else files}; or a new run, with another --out",
    )


def _check_tokenizer(manifest: Manifest, config: RunConfig, path: Path) -> None:
    """Check that text is tokenized as the weights expect, if the checkpoint carries their tokenizer."""
    entry = manifest.files.get(sidecar_path(TOKENIZER))
    name = config.data.tokenizer
    only_token_files = all(is_token_file(one.source) for one in all_sources(run_facts(config).data))
    if entry is None or (name == BYTES and only_token_files):
        return
    if tokenizer_identity(name) == f"{TOKENIZER} {entry.sha256}":
        return
    kept = path.parent.parent / IMPORTED / TOKENIZER
    copy = "" if kept.is_file() else f"cp {quote(str(path / sidecar_path(TOKENIZER)))} {TOKENIZER}, then "
    raise CheckpointError(
        f"data.tokenizer = {name}, but the weights were trained with another tokenizer",
        where=f"data.tokenizer; {path}",
        rule="token ids mean the same to the weights and to the data: a checkpoint keeps its tokenizer",
        fix=copy + format_fix({"data.tokenizer": str(kept) if not copy else TOKENIZER}),
    )


def _check_frozen(before: Sequence[str], config: RunConfig, path: Path) -> None:
    """Check that parameters frozen before stay frozen, since the checkpoint has no optimizer state for them."""
    names = model_facts(config).parameter_names()

    def matching(globs: Sequence[str]) -> list[str]:
        return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]

    still = matching(config.train.freeze)
    thawed = next((name for name in matching(before) if name not in still), None)
    if thawed is not None:
        raise CheckpointError(
            f"{thawed} is trained now, but was frozen when the checkpoint was saved",
            where=f"train.freeze; {path}",
            rule="a checkpoint has no optimizer state of frozen parameters",
            fix=format_fix({"train.freeze": before}),
        )


def _new_folder(name: str) -> Path:
    """Create the next free folder; runs started at the same time get different ones."""
    while True:
        path = RUNS / f"{name}-{max(folder_numbers(name), default=0) + 1}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise
        except OSError as error:
            raise _not_writable(path, error) from None
        else:
            return path


LOCK = "run.lock"

_log = get_logger(__name__)


def hold_folder(folder: Path, hold: ExitStack) -> None:
    """Lock the existing `folder` until `hold` is closed or this process ends.

    Raises:
        InputError: another run holds the lock; the message names its process and host.
    """
    path = folder / LOCK
    try:
        file = _locked(path)
    except BlockingIOError:
        raise InputError(
            f"{folder} is being written by another run: {_holder(path)}",
            where=str(path),
            rule="one run at a time writes to a run folder",
            fix=f"another --out; or {continue_command(folder)}, once that run has ended",
        ) from None
    except OSError as error:
        _log.warning("can't lock %s (%s): another run could write to the same folder", folder, error)
        return
    hold.callback(_release, file, path)


def _locked(path: Path) -> io.FileIO:
    """Open and lock the file; reopen it if the previous holder removed it in between."""
    while True:
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                with suppress(OSError):  # the lock is held even if the disk is full
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on host {socket.gethostname()}\n".encode())
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip() or "it has just started"
    except OSError:
        return "it has just ended"


def _release(file: io.FileIO, path: Path) -> None:
    with suppress(OSError):
        path.unlink()  # still locked, so the file can't belong to another run
    file.close()
