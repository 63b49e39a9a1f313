"""Safetensors files, written and read with one tensor in memory at a time, and the layout that lists a checkpoint's.

The format (https://github.com/huggingface/safetensors#format): 8 bytes of header length, little-endian; a JSON header
of name → dtype, shape and byte range; the tensors' bytes. The library's own `save_file` needs all tensors on the CPU at
once, and neither hashes nor flushes, so files are written here and only read with the library.

`layout.json` holds the tensors and the file of each shard. It corresponds to the metadata of
`torch.distributed.checkpoint`, which PyTorch's own writer pickles: loading a pickle can run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.manifest import DurableFile, FileEntry
from meshwright.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes by their names in safetensors."""

METADATA = "__metadata__"
"""Name in the header that is no tensor's."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to write to a file, fetched only when it is written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]
    """Returns the tensor, on any device and with any strides."""

    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in safetensors.

    Raises:
        CheckpointError: safetensors does not support the dtype.
    """
    if dtype not in _DTYPE_NAMES:
        raise CheckpointError(
            f"tensors of {dtype} can't be saved",
            rule=f"checkpoints are safetensors files, which hold {', '.join(DTYPES)}",
            fix="convert the tensor to one of these before saving",
        )
    return _DTYPE_NAMES[dtype]


def check_name(name: str) -> None:
    """Check that a safetensors file can hold a tensor of this name.

    Raises:
        CheckpointError: it can't.
    """
    if not isinstance(name, str) or name == METADATA or any("\ud800" <= one <= "\udfff" for one in name):
        raise _name_error(repr(name), "is not text, is the format's own, or can't be encoded as UTF-8")


def _name_error(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the tensor name {name} {what}",
        rule="checkpoints are safetensors files, whose tensors have distinct names of Unicode text",
        fix="give the tensor another name",
    )


def write_tensors(
    file: DurableFile, tensors: Sequence[TensorToWrite], *, metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write `tensors` as one safetensors file, and flush it to disk.

    Args:
        file: a new, empty file.
        tensors: tensors with distinct keys.
        metadata: arbitrary strings for the header.

    Raises:
        CheckpointError: safetensors does not support a dtype.
        OSError: as in `DurableFile`.
    """
    # Widest dtypes first, so that each tensor is aligned to its element size, as readers expect.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.key))
    file.write(_header(ordered, metadata))
    for tensor in ordered:
        if tensor.num_bytes():
            file.write(_bytes_of(tensor))
    return file.finish()


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file on the CPU, translating its errors to CheckpointError.

    Raises:
        CheckpointError: the file is missing, unreadable or not safetensors, or lacks a requested tensor.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error}",
            where=str(path),
            rule="tensors are read from undamaged safetensors files",
            fix="verify the files, and restore this one from a copy",
        ) from error


def read_slices(file: Any, key: str, index: tuple[slice, ...]) -> Tensor:
    """Read a slice of one tensor in an open file, without reading the rest from disk."""
    value = file.get_slice(key)[index] if index else file.get_tensor(key)  # a 0-dim tensor cannot be sliced
    assert isinstance(value, Tensor)
    return value


def _header(tensors: Iterable[TensorToWrite], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes()
        if tensor.key in header:  # a shard of w, and a tensor with the name of that shard
            raise _name_error(tensor.key, "is the name of two tensors in a file")
        dtype = dtype_name(tensor.dtype)
        header[tensor.key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: TensorToWrite) -> memoryview:
    value = tensor.fetch().detach()
    announced = value.dtype == tensor.dtype and tuple(value.shape) == tensor.shape
    assert announced, f"{tensor.key} is {value.dtype} {tuple(value.shape)}, not {tensor.dtype} {tensor.shape}"
    flat = value.to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


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


def encode_layout(tensors: Mapping[str, TensorEntry]) -> bytes:
    """Encode `tensors` as the content of `layout.json`, one line per tensor."""
    lines = ",\n".join(f"{json.dumps(name)}: {_encode_tensor(tensors[name])}" for name in sorted(tensors))
    return f'{{"format": {FORMAT}, "tensors": {{\n{lines}\n}}}}\n'.encode()


def read_layout(path: Path) -> CheckpointLayout:
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
    shards = [StoredShard(tuple(offset), tuple(shape), file, key) for offset, shape, file, key in entry["pieces"]]
    return TensorEntry(entry["dtype"], tuple(entry["shape"]), tuple(shards))


def _unreadable(file: Path, state: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name} {state}",
        where=str(file),
        rule="a checkpoint's layout.json lists the files of every tensor",
        fix="give the path of a checkpoint directory, such as runs/<run>/checkpoints/<step>",
    )
