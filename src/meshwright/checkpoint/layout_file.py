"""Checkpoint layout, stored in `layout.json`: the tensors and the file of each shard.

Does not import torch. The layout corresponds to the metadata of `torch.distributed.checkpoint`, which PyTorch's own
writer pickles. Loading a pickle can run code, so this file uses JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError

LAYOUT = "layout.json"
FORMAT = 1


@dataclass(frozen=True)
class StoredShard:
    """A rectangular shard of a tensor, and its location in the checkpoint."""

    offset: tuple[int, ...]
    """First index of the shard in the full tensor, per dim."""
    shape: tuple[int, ...]
    file: str
    """Name of the safetensors file in the checkpoint."""
    key: str
    """Name of the shard in the file."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor and its shards, which do not overlap."""

    dtype: str
    """Name of the dtype in safetensors: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]

    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointLayout:
    """All tensors of a checkpoint, by name."""

    path: Path
    """The checkpoint's directory."""
    tensors: Mapping[str, TensorEntry]

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of the tensor called `name`.

        Raises:
            CheckpointError: the tensor is not in the checkpoint.
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"{name} is not in the checkpoint",
                where=str(self.path),
                rule="every tensor to load is in the checkpoint",
                fix="load it into the model and optimizer that it was saved from",
            )
        return self.tensors[name]


def shard_key(name: str, offset: tuple[int, ...], shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    """Return a shard's name, unique within its file: `w` for a full tensor, `w[0:2,4:8]` for a part."""
    if shape == full:
        return name
    return f"{name}[{','.join(f'{start}:{start + size}' for start, size in zip(offset, shape, strict=True))}]"


def encode(tensors: Mapping[str, TensorEntry]) -> bytes:
    """Encode `tensors` as the content of `layout.json`, one line per tensor."""
    lines = ",\n".join(f"{json.dumps(name)}: {_encode_tensor(tensors[name])}" for name in sorted(tensors))
    return f'{{"format": {FORMAT}, "tensors": {{\n{lines}\n}}}}\n'.encode()


def read(path: Path) -> CheckpointLayout:
    """Read the layout of the checkpoint at `path`.

    Raises:
        CheckpointError: the layout is missing or cannot be read.
    """
    file = path / LAYOUT
    try:
        data = json.loads(file.read_bytes())
        if data["format"] != FORMAT:
            raise _unreadable(file, f"has format {data['format']}; this Meshwright reads format {FORMAT}")
        return CheckpointLayout(path, {name: _decode_tensor(entry) for name, entry in data["tensors"].items()})
    except OSError as error:
        raise _unreadable(file, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(file, f"is not a layout: {error!r}") from None


def _encode_tensor(entry: TensorEntry) -> str:
    shards = [[shard.offset, shard.shape, shard.file, shard.key] for shard in entry.shards]
    return json.dumps({"dtype": entry.dtype, "shape": entry.shape, "pieces": shards})


def _decode_tensor(entry: Any) -> TensorEntry:
    return TensorEntry(entry["dtype"], tuple(entry["shape"]), tuple(_decode_shards(entry["pieces"])))


def _decode_shards(shards: Any) -> Iterator[StoredShard]:
    for offset, shape, file, key in shards:
        yield StoredShard(tuple(offset), tuple(shape), file, key)


def _unreadable(file: Path, state: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name} {state}",
        where=str(file),
        rule="a checkpoint's layout.json lists the files of every tensor",
        fix="give the path of a checkpoint directory, such as runs/<run>/checkpoints/<step>",
    )
