"""Checkpoint manifest, integrity checks, and selection of a run's valid checkpoints. Does not import torch.

`manifest.json` lists the size and hash of every other file; `atomic_directory` describes how it is written. The last
line of the manifest is a hash of all bytes before it, so damage to the manifest itself is detected as well. The hashes
do not protect against tampering: an attacker who can write files can also write hashes.

Files are hashed from memory while they are written, to detect corruption by a failing disk or controller, by plain
`write` calls rather than a memory map: a full disk raises an `OSError` instead of killing the process with a bus error.

Sidecar files, such as the tokenizer's, are what a checkpoint carries for its export. Every later checkpoint of the run
has them too: a path to them could be gone by the time of the export, and earlier checkpoints are removed.
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
from types import TracebackType
from typing import Any

from meshwright.errors import CheckpointError, continue_command
from meshwright.settings.violation import format_fix
from meshwright.units import counted

MANIFEST = "manifest.json"
FORMAT = 1
HASH_THREADS = 8

_COMMITTED = re.compile(r"(\d{8,})(\.old)?")
_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_SEAL_BYTES = len(b'"sha256": ""\n}\n') + 64


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint's `manifest.json`."""

    path: Path
    """The checkpoint's directory."""
    step: int
    """Completed optimizer steps."""
    model: dict[str, Any]
    """The model's identity (`ModelFacts.identity`), as decoded from JSON."""
    run: dict[str, Any]
    """State that the trainer needs to resume, as decoded from JSON."""
    files: dict[str, FileEntry]
    """All files except the manifest, by name."""

    def num_bytes(self) -> int:
        """Return the total size of the files in bytes, without the manifest."""
        return sum(entry.num_bytes for entry in self.files.values())


def encode(*, step: int, model: Mapping[str, Any], run: Mapping[str, Any], files: Mapping[str, FileEntry]) -> bytes:
    """Encode the content of a `manifest.json`, with its own hash in the last line.

    Raises:
        CheckpointError: `model` or `run` holds a value that JSON cannot represent.
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
            f"the run's state cannot be written as JSON: {error}",
            rule="`model` and `run` hold strings, finite numbers, booleans, None, lists and dicts",
            fix="convert the value to one of these before saving",
        ) from None
    body = (text.removesuffix("\n}") + ",\n").encode()
    return body + f'"sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`, and check its own hash but no other file.

    Raises:
        CheckpointError: the manifest is missing, damaged, or has another format version.
    """
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
    except OSError as error:
        state = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise CheckpointError(
            f"{MANIFEST} {state}",
            where=str(path),
            rule="a directory without a valid manifest is not a checkpoint; it may be an interrupted copy",
            fix=_another(path),
        ) from None
    body, seal = raw[:-_SEAL_BYTES], _SEAL.fullmatch(raw[-_SEAL_BYTES:])
    if seal is None or hashlib.sha256(body).hexdigest() != seal[1].decode():
        raise _damaged(path, MANIFEST, "has changed or is truncated: its own hash does not match")
    data = json.loads(raw)
    if data["format"] != FORMAT:
        raise CheckpointError(
            f"{MANIFEST} has format {data['format']}; this Meshwright reads format {FORMAT}",
            where=str(path),
            fix="load it with the Meshwright version that saved it, or a newer one",
        )
    files = {name: FileEntry(**entry) for name, entry in data["files"].items()}
    return Manifest(path=path, step=data["step"], model=data["model"], run=data["run"], files=files)


def verify(path: Path) -> Manifest:
    """Check the sizes, then the hashes, of all files of the checkpoint at `path`. Reads all data once.

    Files that the manifest does not list are ignored.

    Raises:
        CheckpointError: a file is missing, truncated or changed; the error names the first such file.
    """
    manifest = read_manifest(path)
    _check_sizes(manifest)
    with ThreadPoolExecutor(max_workers=min(HASH_THREADS, os.cpu_count() or 1)) as pool:
        # In manifest order, so that the error always names the same one of several damaged files.
        for _ in pool.map(lambda name: _check_hash(path, name, manifest.files[name]), manifest.files):
            pass
    return manifest


def list_checkpoints(root: Path) -> list[Path]:
    """List the directories that have a checkpoint's name, sorted by step, without validating them.

    The list is empty if the root does not exist.
    """
    if not root.is_dir():
        return []
    matches = [(match, entry) for entry in root.iterdir() if (match := _COMMITTED.fullmatch(entry.name))]
    # Sort `.old` before its replacement, so that the last path of a step is the newest.
    matches.sort(key=lambda item: (int(item[0][1]), item[0][2] is None))
    return [entry for _, entry in matches]


def newest_valid(root: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest checkpoint that passes `verify`, and any newer ones that fail, each with the reason."""
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
    """Return the newest checkpoint whose files all exist with the right sizes. Fast, as it computes no hashes."""
    for path in reversed(list_checkpoints(root)):
        try:
            _check_sizes(read_manifest(path))
        except CheckpointError:
            continue
        return path
    return None


def check_model(
    manifest: Manifest, identity: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Check that the checkpoint was saved from the model that `identity` describes.

    Raises:
        CheckpointError: the models differ. The error names the first differing field with both values; its fix sets
            all of them or, given the `sections` of the configuration that describe the model, their keys.
    """
    saved, expected = manifest.model, json.loads(json.dumps(dict(identity)))
    difference = _first_difference(expected, saved)
    if difference is None:
        return
    field, here, there = difference
    flat, config, first = _flatten(expected), manifest.run.get("config"), field.partition(".")[0]
    changed = {name: value for name, value in _flatten(saved).items() if name not in flat or flat[name] != value}
    arguments = model_arguments(changed)
    if config and sections:
        arguments = format_fix(_changed_keys(config, sections, {**expected, **saved}, first))
    name = field if first in (sections or {}) else f"model.{field}"
    if field == "kind":
        own = {f"model.{key}": value for key, value in (config or {}).get("model", {}).items()}
        fix = f"use a preset of a {there}, with {format_fix(own) or model_arguments(saved)}"
    else:
        fix = f"set {arguments}" if arguments else f"omit {name}, or restore the file that has it"
    shown = ["not set" if value is None else json.dumps(value) for value in (here, there)]
    raise CheckpointError(
        f"{name} is {shown[0]} here and {shown[1]} in the checkpoint",
        where=str(manifest.path),
        rule="a checkpoint loads into the model it was saved from, on any layout",
        fix=f"{fix}, or start without this checkpoint",
    )


def _changed_keys(
    saved: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], identity: Mapping[str, Any], field: str
) -> dict[str, Any]:
    """Return the keys of a configuration that differ from the saved one, with their saved values: those by whose names
    the model's identity goes or, if `field` of it is no key but, say, in a file, all."""
    known = {name: identity if name == "model" else identity.get(name, {}) for name in sections}
    is_key = field in {*sections, *sections.get("model", {})}
    return {
        f"{name}.{key}": saved[name][key]
        for name, values in sections.items()
        for key, value in json.loads(json.dumps(dict(values))).items()
        if saved.get(name, {}).get(key, value) != value and (key in known[name] or not is_key)
    }


def model_arguments(model: Mapping[str, Any]) -> str:
    """Return the command-line arguments that reproduce the model identity `model`."""
    words = []
    for name, value in _flatten(model).items():
        word = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
        words.append(f"model.{name}={word}")
    return " ".join(words)


def _first_difference(
    here: Mapping[str, Any], there: Mapping[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    """Return the dotted name of the first value that differs, and both values; None stands for missing values."""
    for name in {**here, **there}:
        here_value, there_value = here.get(name), there.get(name)
        if isinstance(here_value, dict) and isinstance(there_value, dict):
            if difference := _first_difference(here_value, there_value, f"{prefix}{name}."):
                return difference
        elif here_value != there_value:
            return prefix + name, here_value, there_value
    return None


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _check_sizes(manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        if problem := size_problem(manifest.path / name, entry):
            raise _damaged(manifest.path, name, problem)


def size_problem(file: Path, entry: FileEntry) -> str:
    """Describe how the size of `file` differs from `entry`; return an empty string if it matches."""
    try:
        num_bytes = file.stat().st_size
    except OSError as error:
        return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    if num_bytes < entry.num_bytes:
        return f"is truncated: {num_bytes} of {entry.num_bytes} bytes"
    if num_bytes > entry.num_bytes:
        return f"is too long: {counted(num_bytes, 'byte')} instead of {entry.num_bytes}"
    return ""


def _check_hash(path: Path, name: str, entry: FileEntry) -> None:
    try:
        actual = hash_file(path / name)
    except OSError as error:
        raise _damaged(path, name, f"cannot be read: {error.strerror}") from None
    if actual.sha256 != entry.sha256:
        raise _damaged(path, name, "has changed content: its SHA-256 is not the one in the manifest")


def _another(path: Path) -> str:
    """Return the fix for a damaged checkpoint; one that stands in no run folder has no other beside it."""
    in_run = path.parent.name == "checkpoints" and path.parent.parent.name
    newest = f" ({continue_command(path.parent.parent)} takes the newest valid one)" if in_run else ""
    return f"use another checkpoint{newest} or restore a copy"


def _damaged(path: Path, name: str, state: str) -> CheckpointError:
    return CheckpointError(
        f"{name} {state}",
        where=str(path / name),
        rule="every file of a checkpoint has the size and hash recorded in its manifest",
        fix=_another(path),
    )


SIDECARS = "sidecars"


def sidecar_path(name: str) -> str:
    """Return the path of a sidecar file inside its checkpoint, as listed in the manifest."""
    return f"{SIDECARS}/{name}"


def read_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Read a checkpoint's sidecar files, by name; without checking their hashes."""
    names = [name for name in manifest.files if name.startswith(sidecar_path(""))]
    try:
        return {name.removeprefix(sidecar_path("")): (manifest.path / name).read_bytes() for name in names}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} cannot be read: {error.strerror}",
            where=str(manifest.path),
            rule="a checkpoint carries the files in its manifest",
            fix="use another checkpoint or restore a copy",
        ) from None


CHUNK_BYTES = 8 << 20
"""Bytes hashed and written at a time; few enough to stay in the processor's cache in between."""


@dataclass(frozen=True)
class FileEntry:
    """Expected size in bytes and hex SHA-256 of a file's content."""

    num_bytes: int
    sha256: str


class DurableFile:
    """A new file being written; `finish` flushes it to disk and returns its size and hash.

    Raises:
        FileExistsError: the file exists, which means that two writers use the same name.
        OSError: from any method, as reported by the operating system (`ENOSPC` for a full disk).
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._hash = hashlib.sha256()
        self.bytes_written = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, a contiguous buffer of any item type."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._hash.update(chunk)
            while len(chunk):
                num_bytes = os.write(self._fd, chunk)
                self.bytes_written += num_bytes
                chunk = chunk[num_bytes:]

    def finish(self) -> FileEntry:
        """Flush the file to disk, and return its manifest entry."""
        os.fsync(self._fd)
        return FileEntry(self.bytes_written, self._hash.hexdigest())

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write a new file, and flush it to disk."""
    with DurableFile(path) as file:
        file.write(data)
        return file.finish()


def hash_file(path: Path) -> FileEntry:
    """Return the size and hash of a file."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def sync_directory(path: Path) -> None:
    """Flush a directory to disk, so that names created, renamed or removed in it are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
