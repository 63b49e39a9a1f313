"""Which tensors a checkpoint holds, and where each piece of each is: the value in `layout.json`.

Torch-free. It is what `torch.distributed.checkpoint` calls metadata, which its own file writer pickles; a
pickle runs code when it is loaded, so ours is JSON.
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
class Piece:
    """A rectangular piece of a tensor."""

    offset: tuple[int, ...]
    """First index of the piece in the full tensor, per dim."""
    shape: tuple[int, ...]
    file: str
    """The safetensors file of the checkpoint that holds it …"""
    key: str
    """… under this name."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor and the pieces that make it up, which do not overlap."""

    dtype: str
    """As safetensors writes it: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """All tensors of a checkpoint, by name."""

    path: Path
    """The checkpoint's directory."""
    tensors: Mapping[str, TensorEntry]

    def entry(self, name: str) -> TensorEntry:
        """The tensor of that name.

        Raises:
            CheckpointError: there is none.
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"{name} is not in the checkpoint",
                where=str(self.path),
                rule="every tensor to load is in the checkpoint",
                fix="load it into the model and optimizer that it was saved from",
            )
        return self.tensors[name]


def piece_key(name: str, offset: tuple[int, ...], shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    """A name for a piece that no other piece in the same file has: `w`, or `w[0:2,4:8]` for a part of it."""
    if shape == full:
        return name
    return f"{name}[{','.join(f'{start}:{start + size}' for start, size in zip(offset, shape, strict=True))}]"


def encode(tensors: Mapping[str, TensorEntry]) -> bytes:
    """The content of the `layout.json` of a checkpoint of `tensors`: one line a tensor."""
    lines = ",\n".join(f"{json.dumps(name)}: {_encode_tensor(tensors[name])}" for name in sorted(tensors))
    return f'{{"format": {FORMAT}, "tensors": {{\n{lines}\n}}}}\n'.encode()


def read(path: Path) -> Layout:
    """The layout of the checkpoint at `path`.

    Raises:
        CheckpointError: there is none, or it is not one that we can read.
    """
    file = path / LAYOUT
    try:
        data = json.loads(file.read_bytes())
        if data["format"] != FORMAT:
            raise _unreadable(file, f"has format {data['format']}; this Meshwright reads format {FORMAT}")
        return Layout(path, {name: _decode_tensor(entry) for name, entry in data["tensors"].items()})
    except OSError as error:
        raise _unreadable(file, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(file, f"is not a layout: {error!r}") from None


def _encode_tensor(entry: TensorEntry) -> str:
    pieces = [[piece.offset, piece.shape, piece.file, piece.key] for piece in entry.pieces]
    return json.dumps({"dtype": entry.dtype, "shape": entry.shape, "pieces": pieces})


def _decode_tensor(entry: Any) -> TensorEntry:
    return TensorEntry(entry["dtype"], tuple(entry["shape"]), tuple(_decode_pieces(entry["pieces"])))


def _decode_pieces(pieces: Any) -> Iterator[Piece]:
    for offset, shape, file, key in pieces:
        yield Piece(tuple(offset), tuple(shape), file, key)


def _unreadable(file: Path, state: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name} {state}",
        where=str(file),
        rule="a checkpoint's layout.json says where every tensor is",
        fix="give the path of a checkpoint directory, such as runs/<run>/checkpoints/<step>",
    )
