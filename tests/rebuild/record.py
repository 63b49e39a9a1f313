"""What a run left that another checkout has to leave bit for bit, read from its folder and what it printed.

A checkpoint's tensors are read as bits by its format, safetensors and `layout.json`, and not by the package.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
         "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}  # fmt: skip
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
         "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1"}  # fmt: skip
HEADER_LENGTH = 8
OF_THE_MACHINE = ("tokens_per_s", "memory_bytes")
"""What of a line of metrics depends on when and where the run was."""
SAMPLE = "sample\n"
"""The line before the text that a run prints at its end."""


@dataclass(frozen=True)
class Tensor:
    """A whole tensor: its dtype as safetensors writes it, its shape, and its bytes in order of rows."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @cached_property
    def fingerprint(self) -> str:
        """Of everything that it is."""
        head = f"{self.dtype} {self.shape} ".encode()
        return hashlib.sha256(head + self.data).hexdigest()

    def kind(self) -> str:
        """Dtype and shape, for people."""
        return f"{self.dtype} {list(self.shape)}"

    def num_elements(self) -> int:
        """Of the whole."""
        return math.prod(self.shape)

    def values(self) -> np.ndarray:
        """As float64, for the size of a difference."""
        if self.dtype == "BF16":
            return (np.frombuffer(self.data, "<u2").astype("<u4") << 16).view("<f4").astype("f8")
        return np.frombuffer(self.data, NUMPY[self.dtype]).astype("f8")

    def num_different(self, other: Tensor) -> int:
        """Elements with other bits, of a tensor of this kind."""
        ours, theirs = (np.frombuffer(one.data, f"V{BYTES[self.dtype]}") for one in (self, other))
        return int((ours != theirs).sum())


@dataclass(frozen=True)
class Record:
    """A run that came to its end, or what it said instead."""

    steps: tuple[Mapping[str, Any], ...] = ()
    """A line of metrics each; JSON keeps floats exactly."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the last checkpoint."""
    drawn: Mapping[str, str] = field(default_factory=dict)
    """The sample's text, and the hashes of pictures' files."""
    error: str = ""
    """The end of what a run that failed said."""


def read_record(out: Path, printed: str) -> Record:
    """The record of the run in `out`."""
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines())
    steps = tuple({key: value for key, value in line.items() if key not in OF_THE_MACHINE} for line in lines)
    drawn = {f"samples/{path.name}": _hash(path) for path in sorted(out.glob("samples/*"))}
    if SAMPLE in printed:
        drawn["sample"] = printed.rpartition(SAMPLE)[2]
    return Record(steps, read_tensors(checkpoints(out)[-1]), drawn)


def checkpoints(out: Path) -> list[Path]:
    """Of the run in `out`, the oldest first."""
    found = [path for path in (out / "checkpoints").iterdir() if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, put together from its pieces.

    Raises:
        ValueError: a format that isn't known here, or pieces that don't make up a tensor.
    """
    path = checkpoint / "layout.json"
    if not path.is_file():
        raise ValueError(f"{checkpoint.name} has no layout.json: a format that tests/rebuild/record.py does not know")
    layout = json.loads(path.read_bytes())
    files: dict[str, Mapping[str, bytes]] = {}
    found = {}
    for name, entry in layout["tensors"].items():
        width, shape = BYTES[entry["dtype"]], tuple(entry["shape"])
        whole = np.zeros(shape, f"V{width}")
        if sum(math.prod(size) for _, size, _, _ in entry["pieces"]) != whole.size:
            raise ValueError(f"the pieces of {name} are not the whole of it")
        for offset, size, file, key in entry["pieces"]:
            if file not in files:
                files[file] = read_safetensors(checkpoint / file)
            place = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
            whole[place] = np.frombuffer(files[file][key], f"V{width}").reshape(size)
        found[name] = Tensor(entry["dtype"], shape, whole.tobytes())
    return found


def read_safetensors(path: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a file (https://github.com/huggingface/safetensors#format)."""
    raw = path.read_bytes()
    start = HEADER_LENGTH + int.from_bytes(raw[:HEADER_LENGTH], "little")
    header = json.loads(raw[HEADER_LENGTH:start])
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: raw[start + first : start + last] for name, (first, last) in offsets.items()}
