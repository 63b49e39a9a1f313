"""Weights of a model's folder, as initial values by name.

Tensors are read from the folder's safetensors by the model's own names, each when it is needed. Where transformers
stores a model otherwise than it computes, as experts one by one, it converts them once, into the cache.
"""

from __future__ import annotations

import hashlib
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
        CheckpointError: the folder has no such tensor, or no safetensors.
    """
    path = _converted(folder, names, cache_dir) or weight_file(folder, name)
    with open_tensors(path) as file:
        if name in file.keys():  # noqa: SIM118
            tensor: Tensor = file.get_tensor(name)
            return tensor
    raise CheckpointError(
        f"the weights have no tensor {name}",
        where=str(folder),
        rule="the folder of model.config has a tensor for each parameter",
        fix="model.weights=random, or a complete folder (hf download)",
    )


@lru_cache(maxsize=4)
def _converted(folder: Path, names: frozenset[str], cache_dir: str | None) -> Path | None:
    """Return the file of converted weights, or None if the folder's own have the model's names."""
    with open_weights(folder) as weights:
        if names <= weights.keys():
            return None
    files = sorted(folder.glob("*.safetensors"))
    state = [transformers_version(), *(f"{f.resolve()} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)]
    name = f"weights-{hashlib.sha256(str(state).encode()).hexdigest()[:32]}.safetensors"
    path = writable_directory(preferred_directory(cache_dir)) / name
    with build_lock(path):  # all ranks come here, and one of a machine converts
        if not path.is_file():
            _log.info("converting the weights of %s to the names of transformers %s", folder, transformers_version())
            with atomic_write(path) as file:
                private.convert_weights(folder, Path(file.name))
    return path
