"""Cache of derived structures: one JSON file per model, layout of tp and versions. Doesn't import torch."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.models.hf.structure import Structure

FORMAT = 9
"""Increased when the derivation changes, so that earlier files are derived again."""
_ADAPTER = TypeAdapter(Structure)


def cached_structure(key: Mapping[str, Any], derive: Callable[[], Structure], *, cache_dir: str | None) -> Structure:
    """Return the structure kept under a key, and derive and keep it if there is none.

    Args:
        key: everything that determines the structure, as JSON values.
        derive: derives the structure; imports torch.
        cache_dir: directory of the cache; `~/.cache/meshwright` by default.
    """
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **key}, sort_keys=True).encode()).hexdigest()
    path = cache_directory(cache_dir) / f"model-{digest[:32]}.json"
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        pass
    found = derive()
    _write(path, _ADAPTER.dump_json(found))
    return found


def cache_directory(cache_dir: str | None) -> Path:
    """Return the directory of the cache; `~/.cache/meshwright` if None."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def _write(path: Path, content: bytes) -> None:
    """Write a file so that readers see all of it or none; a cache that can't be written is done without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    except OSError:
        pass
