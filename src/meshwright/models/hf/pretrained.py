"""Weights of a model's folder, as initial values by name.

Tensors are read from the folder's safetensors by the model's own names, each when it is needed. Where transformers
stores a model otherwise than it computes, as experts one by one, it converts them once, into the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.safetensors_file import open_tensors
from meshwright.data.cache_directory import preferred_directory, writable_directory
from meshwright.data.cache_file import atomic_write, build_lock
from meshwright.errors import CheckpointError
from meshwright.log import get_logger
from meshwright.models.hf import private
from meshwright.models.hf.source import transformers_version
from meshwright.models.huggingface.weight_files import open_weights, weight_file

_log = get_logger(__name__)


def read_pretrained(folder: Path, name: str, names: frozenset[str], *, cache_dir: str | None) -> Tensor:
    """Return a tensor of a folder's weights by its name in the model.

    Args:
        folder: folder with safetensors.
        name: name of a parameter or saved buffer.
        names: names of all of them, by which the folder's are judged.
        cache_dir: directory of converted weights.

    Raises:
        CheckpointError: the folder has no safetensors, or lacks a tensor.
    """
    path = _converted(folder, names, cache_dir) or weight_file(folder, name)
    with open_tensors(path) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def check_pretrained(folder: Path, shapes: Mapping[str, tuple[int, ...]], *, cache_dir: str | None) -> None:
    """Check that a folder's weights are complete and of the model's shapes, after converting them if they need it.

    Args:
        folder: folder with safetensors.
        shapes: shapes of the parameters and saved buffers, by name.
        cache_dir: directory of converted weights.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing or has another shape.
    """
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise _unfit(folder, "the folder has no weights")
    if _converted(folder, frozenset(shapes), cache_dir) is not None:
        return  # transformers has compared them
    with open_weights(folder) as weights:
        for name, shape in shapes.items():
            found = tuple(weights[name].shape)
            if found != shape:
                raise _unfit(folder, f"the weights have {name} of shape {found}, but the model has {shape}")


def _unfit(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=f"model.weights, {folder}",
        rule="with model.weights = folder, its weights have a tensor for each parameter of its config.json",
        fix="model.weights=random, or the complete folder (hf download)",
    )


@lru_cache(maxsize=4)
def _converted(folder: Path, names: frozenset[str], cache_dir: str | None) -> Path | None:
    """Return the file of converted weights, or None if the folder's own have the model's names."""
    with open_weights(folder) as weights:
        if names <= weights.keys():
            return None
    files = sorted(path for glob in ("config.json", "*.safetensors") for path in folder.glob(glob))
    state = [transformers_version(), *(f"{f.resolve()} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)]
    name = f"weights-{hashlib.sha256(str(state).encode()).hexdigest()[:32]}.safetensors"
    path = writable_directory(preferred_directory(cache_dir)) / name
    with build_lock(path):  # all ranks come here, and one of a machine converts
        if not path.is_file():
            _log.info("converting the weights of %s to the names of transformers %s", folder, transformers_version())
            with atomic_write(path) as file:
                _convert(folder, names, Path(file.name))
    return path


def _convert(folder: Path, names: frozenset[str], out: Path) -> None:
    try:
        unfit = private.convert_weights(folder, names, out)
    except Exception as error:  # of whatever kind
        reason = " ".join(str(error).split())[:200]
        raise _unfit(folder, f"transformers can't load the weights: {type(error).__name__}: {reason}") from error
    if unfit:
        more = f" ({len(unfit) - 1} more like it)" if len(unfit) > 1 else ""
        raise _unfit(folder, f"the weights have {unfit[0]}{more}")
