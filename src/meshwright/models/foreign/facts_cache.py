"""Cache of derived structures: one JSON file per model, layout of tp and versions. Doesn't import torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.data.cache_file import preferred_directory, writable_directory
from meshwright.models.foreign.structure import Structure

FORMAT = 16
"""Increased when the derivation changes, so that earlier files are derived again."""
_ADAPTER = TypeAdapter(Structure)


def cached_structure(key: Mapping[str, Any], derive: Callable[[], Structure], *, cache_dir: str | None) -> Structure:
    """Return the structure kept under a key, and derive and keep it if there is none.

    Args:
        key: everything that determines the structure, as JSON values.
        derive: derives the structure; imports torch.
        cache_dir: directory of the cache; `~/.cache/meshwright` by default.

    Raises:
        DataError: the file can't be written.
    """
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **key}, sort_keys=True).encode()).hexdigest()
    name, preferred = f"model-{digest[:32]}.json", preferred_directory(cache_dir)
    if preferred is not None and (found := _read(preferred / name)) is not None:
        return found
    from meshwright.data.cache_file import atomic_write

    directory = writable_directory(preferred)
    if directory != preferred and (found := _read(directory / name)) is not None:
        return found
    found = derive()
    with atomic_write(directory / name) as file:
        file.write(_ADAPTER.dump_json(found))
    return found


def _read(path: Path) -> Structure | None:
    """Return the structure in a file, or None if there is none or it is damaged."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
