"""Describe captured layers for a capture plan: shapes, bytes, and how they follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from meshwright.errors import InputError
from meshwright.units import counted

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSignature:
    """Shape, dtype and device of a static tensor. Only tensors with equal signatures share memory.

    Raises:
        InputError: the dtype is unknown.
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            what = f"unknown dtype {self.dtype!r}"
            rule, fix = f"dtypes are {', '.join(ITEM_BYTES)}", "bfloat16"
            raise InputError(what, where="TensorSignature.dtype", rule=rule, fix=fix)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{'×'.join(map(str, self.shape))} {self.dtype} on {self.device}"


@dataclass(frozen=True)
class ArgumentSignature:
    """A tensor besides the input that changes with the micro-batch, such as a condition or positions."""

    tensor: TensorSignature
    number: int
    """Number among the arguments of its chunk, at least 1; layers that take the same tensor give the same number."""
    has_gradient: bool = False


@dataclass(frozen=True)
class ResultSignature:
    """A tensor that a layer returns besides its output."""

    tensor: TensorSignature
    has_gradient: bool = True


@dataclass(frozen=True)
class LayerSignature:
    """What the plan knows of a captured layer, or of a region of one."""

    input: TensorSignature
    output: TensorSignature
    follows: bool = True
    """Whether the layer reads the output of the captured layer before it as it is. False if eager code stands between
    them, which may change the tensor or keep it for its own backward. Ignored for the first layer of a chunk."""
    saves_output: bool = True
    """Whether the layer's backward may read its output. True is always safe."""
    saved_bytes: int = 0
    """Memory that the forward leaves to the backward, without input and output."""
    temporary_bytes: int = 0
    """Memory that a forward or backward needs besides while it runs."""
    arguments: tuple[ArgumentSignature, ...] = ()
    results: tuple[ResultSignature, ...] = ()


Chunks = dict[int, tuple[LayerSignature, ...]]
"""Captured layers of each stage on a rank, in the order in which they run."""


def chunks_of(
    stages: Sequence[int],
    layers_per_chunk: int | Sequence[int],
    signatures: LayerSignature | Sequence[Sequence[LayerSignature]],
) -> Chunks:
    """Return the captured layers of a rank's stages.

    Args:
        layers_per_chunk: number of captured layers of each of these stages, or of each if it is one number.
        signatures: signature of all layers, or those of each stage's layers.

    Raises:
        InputError: the numbers don't agree.
    """
    counts = [layers_per_chunk] * len(stages) if isinstance(layers_per_chunk, int) else list(layers_per_chunk)
    if len(counts) != len(stages) or min(counts, default=0) < 0:
        what = f"layers_per_chunk = {tuple(counts)} for a rank with {counted(len(stages), 'stage')}"
        rule = "one number of layers, at least 0, for each stage of the rank"
        fix = f"layers_per_chunk={(1,) * len(stages)}"
        raise InputError(what, where="plan_capture, layers_per_chunk", rule=rule, fix=fix)
    if isinstance(signatures, LayerSignature):
        return {stage: (signatures,) * count for stage, count in zip(stages, counts, strict=True)}
    given = [len(own) for own in signatures]
    if given != counts:
        what = f"signatures for {given} layers, where the stages have {counts}"
        rule, fix = "one signature per captured layer of each stage", f"layers_per_chunk={tuple(given)}"
        raise InputError(what, where="plan_capture, signatures", rule=rule, fix=fix)
    return {stage: tuple(own) for stage, own in zip(stages, signatures, strict=True)}
