"""The manifest: what a checkpoint holds, its integrity, and which of a run's checkpoints can be trusted.

Torch-free. `manifest.json` names every other file with its size and hash; how a directory comes to have one
is told in `directory`. The manifest protects itself too: its last line is the hash of every byte before it,
so any changed byte is noticed in it as in any other file. This finds damage, not malice: who can write
files can write hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.durable_files import FileEntry, hash_file
from meshwright.errors import CheckpointError

__all__ = [
    "FileEntry",
    "Manifest",
    "check_model",
    "encode",
    "hash_file",
    "list_checkpoints",
    "model_words",
    "newest_complete",
    "newest_valid",
    "read_manifest",
    "size_problem",
    "verify",
]

MANIFEST = "manifest.json"
FORMAT = 1
HASH_THREADS = 8
FIX_DAMAGED = "use another checkpoint (`run --resume auto` takes the newest valid one) or restore a copy"

_COMMITTED = re.compile(r"(\d{8,})(\.old)?")
_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_SEAL_BYTES = len(b'"sha256": ""\n}\n') + 64


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is."""

    path: Path
    """The checkpoint's directory."""
    step: int
    """Optimizer steps done when it was saved."""
    model: dict[str, Any]
    """The model's identity (`ModelFacts.identity`), as JSON gives it back."""
    run: dict[str, Any]
    """What the trainer needs to go on, as JSON gives it back."""
    files: dict[str, FileEntry]
    """Every file but the manifest, by name."""

    def num_bytes(self) -> int:
        """Size of the data, without the manifest."""
        return sum(entry.num_bytes for entry in self.files.values())


def encode(*, step: int, model: Mapping[str, Any], run: Mapping[str, Any], files: Mapping[str, FileEntry]) -> bytes:
    """The content of a `manifest.json`, its own hash in the last line.

    Raises:
        CheckpointError: `model` or `run` holds a value that JSON can't.
    """
    data = {
        "format": FORMAT,
        "step": step,
        "model": dict(model),
        "run": dict(run),
        "files": {name: asdict(files[name]) for name in sorted(files)},
    }
    try:
        text = json.dumps(data, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"what the run wants to keep can't be written as JSON: {error}",
            rule="`model` and `run` hold strings, finite numbers, booleans, None, lists and dicts",
            fix="turn the value into one of these before saving",
        ) from None
    body = (text.removesuffix("\n}") + ",\n").encode()
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, with its own hash checked, and nothing else.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer Meshwright wrote it.
    """
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
    except OSError as error:
        state = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise CheckpointError(
            f"{MANIFEST} {state}",
            where=str(path),
            rule="a directory without a valid manifest is not a checkpoint; an interrupted copy leaves such",
            fix=FIX_DAMAGED,
        ) from None
    body, seal = raw[:-_SEAL_BYTES], _SEAL.fullmatch(raw[-_SEAL_BYTES:])
    if seal is None or hashlib.sha256(body).hexdigest() != seal[1].decode():
        raise _damaged(path, MANIFEST, "has changed or is cut short: its own hash does not match")
    data = json.loads(raw)
    if data["format"] != FORMAT:
        raise CheckpointError(
            f"{MANIFEST} has format {data['format']}; this Meshwright reads format {FORMAT}",
            where=str(path),
            fix="load it with the version of Meshwright that saved it, or a newer one",
        )
    files = {name: FileEntry(**entry) for name, entry in data["files"].items()}
    return Manifest(path=path, step=data["step"], model=data["model"], run=data["run"], files=files)


def verify(path: Path) -> Manifest:
    """Check every file of the checkpoint at `path`: first all sizes, then all hashes. Reads everything once.

    A file that the manifest does not name is ignored.

    Raises:
        CheckpointError: names the first damaged file, and whether it is missing, truncated or changed.
    """
    manifest = read_manifest(path)
    _check_sizes(manifest)
    with ThreadPoolExecutor(max_workers=min(HASH_THREADS, os.cpu_count() or 1)) as pool:
        # In the manifest's order, so that of several damaged files the same one is always named.
        for _ in pool.map(lambda name: _check_hash(path, name, manifest.files[name]), manifest.files):
            pass
    return manifest


def list_checkpoints(root: Path) -> list[Path]:
    """Directories with a checkpoint's name, by step; whether they are valid is `verify`'s to say.

    A root that does not exist has none.
    """
    if not root.is_dir():
        return []
    found = [(match, entry) for entry in root.iterdir() if (match := _COMMITTED.fullmatch(entry.name))]
    # `.old` before its successor: the later one of a step is the newer one.
    found.sort(key=lambda item: (int(item[0][1]), item[0][2] is None))
    return [entry for _, entry in found]


def newest_valid(root: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint that passes `verify`, and the newer ones passed over, each with the reason."""
    passed_over: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(root)):
        try:
            verify(path)
        except CheckpointError as error:
            passed_over.append((path, error.what))
        else:
            return path, passed_over
    return None, passed_over


def newest_complete(root: Path) -> Path | None:
    """The newest checkpoint whose files are all there with their sizes. Hashes nothing: it is fast."""
    for path in reversed(list_checkpoints(root)):
        try:
            _check_sizes(read_manifest(path))
        except CheckpointError:
            continue
        return path
    return None


def check_model(manifest: Manifest, identity: Mapping[str, Any]) -> None:
    """Check that the checkpoint is of the model that `identity` describes.

    Raises:
        CheckpointError: names the first field that differs, with both values; the fix sets all that differ.
    """
    saved, wanted = manifest.model, json.loads(json.dumps(dict(identity)))
    difference = _first_difference(wanted, saved)
    if difference is None:
        return
    field, here, there = difference
    flat = _flatten(wanted)
    others = {name: value for name, value in _flatten(saved).items() if name not in flat or flat[name] != value}
    words = model_words(others)
    if field == "kind":
        fix = f"a preset of a {there}, with {model_words(saved)}"
    else:
        fix = f"set {words}" if words else f"leave model.{field} out"
    raise CheckpointError(
        f"model.{field} is {_show(here)} here and {_show(there)} in the checkpoint",
        where=str(manifest.path),
        rule="a checkpoint loads into the model it was saved from, on any layout",
        fix=f"{fix}, or start without this checkpoint",
    )


def model_words(model: Mapping[str, Any]) -> str:
    """The words of a command line that describe a model as its identity does."""
    words = []
    for name, value in _flatten(model).items():
        word = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
        words.append(f"model.{name}={word}")
    return " ".join(words)


def _first_difference(
    here: Mapping[str, Any], there: Mapping[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    """The dotted name of the first value that differs, and both; what is not there is not set."""
    for name in {**here, **there}:
        mine, other = here.get(name), there.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            if found := _first_difference(mine, other, f"{prefix}{name}."):
                return found
        elif mine != other:
            return prefix + name, mine, other
    return None


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _show(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def _check_sizes(manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        problem = size_problem(manifest.path / name, entry)
        if problem:
            raise _damaged(manifest.path, name, problem)


def size_problem(file: Path, entry: FileEntry) -> str:
    """How the size of `file` is not what `entry` says; empty when it is."""
    try:
        num_bytes = file.stat().st_size
    except OSError as error:
        return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    if num_bytes < entry.num_bytes:
        return f"is truncated: {num_bytes} of {entry.num_bytes} bytes"
    if num_bytes > entry.num_bytes:
        return f"is too long: {num_bytes} bytes where {entry.num_bytes} were written"
    return ""


def _check_hash(path: Path, name: str, entry: FileEntry) -> None:
    try:
        found = hash_file(path / name)
    except OSError as error:
        raise _damaged(path, name, f"cannot be read: {error.strerror}") from None
    if found.sha256 != entry.sha256:
        raise _damaged(path, name, "has changed content: its SHA-256 is not the one in the manifest")


def _damaged(path: Path, name: str, state: str) -> CheckpointError:
    return CheckpointError(
        f"{name} {state}",
        where=str(path / name),
        rule="every file of a checkpoint has the size and hash that its manifest says",
        fix=FIX_DAMAGED,
    )
