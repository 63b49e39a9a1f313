"""Values that a `Recorder` records on one rank, and the hash of a sample's content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError

IGNORED = -100
"""Target that PyTorch's cross-entropy ignores unless told otherwise."""
ShardsByName = dict[str, tuple[tuple[int, ...], Tensor]]
"""Per parameter: offset and value of the local shard."""


@dataclass
class RankRecord:
    """What one rank did; only numbers, text and tensors, for `torch.load` with `weights_only=True`."""

    samples: list[list[int]] = field(default_factory=list)
    """[step]: hashes of the samples of the step, in order."""
    microbatches: list[int] = field(default_factory=list)
    """[step]: number of micro-batches."""
    losses: list[list[float]] = field(default_factory=list)
    """[step]: values given to `loss`."""
    norms: list[list[float]] = field(default_factory=list)
    learning_rates: list[list[float]] = field(default_factory=list)
    """[step][parameter group]"""
    options: list[dict[str, list[float]]] = field(default_factory=list)
    """Per parameter group: numbers that the optimizer was given, such as betas, except the learning rate."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Full shape of each parameter."""
    initial: ShardsByName = field(default_factory=dict)
    gradients: ShardsByName = field(default_factory=dict)
    before_microbatches: ShardsByName = field(default_factory=dict)
    """Sum of the gradients at the start of each micro-batch of step 1: what an overwritten gradient has lost."""
    before_last: ShardsByName = field(default_factory=dict)
    """Gradients at the start of the last micro-batch of step 1."""
    norms_between: list[float] = field(default_factory=list)
    """Norm of this rank's gradients at the start of each micro-batch of step 1, but for the first."""
    is_stepped_between: bool = False
    """Whether weights changed between micro-batches of step 1."""
    uncleared: list[str] = field(default_factory=list)
    """Parameters that still had a gradient when step 2 began."""
    targets: list[list[int]] = field(default_factory=list)
    """[step][batch]: number of targets that are not ignored; -1 where there are no integers."""
    after_first: ShardsByName = field(default_factory=dict)
    parameters: ShardsByName = field(default_factory=dict)
    partial: dict[str, list[str]] = field(default_factory=dict)
    """Mesh dims over which a recorded gradient is a partial sum, per parameter; absent for complete gradients."""
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Per mesh dim: the ranks along it, through this rank."""
    sharded: list[str] = field(default_factory=list)
    """Mesh dims over which a parameter is sharded."""
    trainable: dict[str, bool] = field(default_factory=dict)
    optimized: dict[str, bool] = field(default_factory=dict)
    """Whether the optimizer holds the parameter; empty if the recorder was given no optimizer."""
    num_foreign: int = 0
    """Number of tensors in the optimizer that are no parameters of the model."""
    tied: list[list[str]] = field(default_factory=list)
    """Names that share one tensor."""
    scaled: list[float] = field(default_factory=list)
    """Factor between `gradients` and the optimizer's step in step 1, such as a clipping factor; empty if not known."""
    fixed_samplers: int = 0
    """Number of shuffling `DistributedSampler`s whose epoch was never set."""
    eps: float = 0.0
    """Rounding unit of the parameters' dtype, the largest of all."""
    dtype: str = ""
    unit: float = 0.0
    """Rounding unit of the outputs of modules in step 1, the largest of all."""
    computed_in: str = ""
    """Dtype of these outputs."""

    def save(self, path: Path) -> None:
        """Save the record; it appears under its name only once it is complete."""
        temporary = path.with_suffix(".tmp")
        torch.save(vars(self), temporary)
        temporary.rename(path)

    @staticmethod
    def load(path: Path) -> RankRecord:
        """Load a record."""
        return RankRecord(**torch.load(path, weights_only=True))


def hash_rows(values: tuple[Any, ...]) -> list[int]:
    """Hash each sample of a batch: the row of every tensor, with its dtype and shape.

    Raises:
        InputError: there are no tensors, or their first dims differ.
    """
    tensors = list(tensors_of(values))
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1:
        raise InputError(
            f"recorder.batch was given tensors with {sorted(sizes)} rows" if sizes else "recorder.batch has no tensors",
            where="Recorder.batch",
            rule="all tensors of a batch have one row per sample, in the same order",
            fix="recorder.batch(inputs, targets), both with the samples along dim 0",
        )
    digests = [hashlib.blake2b(digest_size=8) for _ in range(sizes.pop())]
    for tensor in tensors:
        kind = f"{tensor.dtype}{tuple(tensor.shape[1:])}".encode()
        rows = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
        for digest, row in zip(digests, rows.view(torch.uint8).numpy(), strict=True):
            digest.update(kind + row.tobytes())
    return [int.from_bytes(digest.digest(), "big", signed=True) for digest in digests]


def count_targets(values: tuple[Any, ...]) -> int:
    """Return how many targets a loss counts: those of the last tensor of integers that are not ignored, -1 if none."""
    integers = [tensor for tensor in tensors_of(values) if not (tensor.is_floating_point() or tensor.is_complex())]
    return int((integers[-1] != IGNORED).sum()) if integers else -1


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch that have rows."""
    if isinstance(value, Tensor):
        if value.dim():
            yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from tensors_of(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
