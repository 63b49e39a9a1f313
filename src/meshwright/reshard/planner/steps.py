"""Redistribution plans: immutable chains of steps that change a tensor's layout.

A step consists of a kind, the mesh axes it communicates over (merged into one group), and the layouts before and after.
The executor needs nothing else, because one rule determines all messages:

  [Note: owners] A rank receives each element of its new shard from the ranks with these coordinates on each axis:
  - on an axis outside `axes`: its own coordinate;
  - on an axis that is replicated before the step: its own coordinate;
  - on an axis that shards a tensor dim before the step: the coordinate of the shard that contains the element;
  - on an axis that is partial before the step and not after: all coordinates, in ascending order; the values are
    reduced in that order (the last axis first), so that all replicas are bitwise equal.

Elements that a rank already holds are not sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.shard_intervals import Reduction, Split

T = TypeVar("T")


class StepKind(StrEnum):
    """Kind of a step. Steps of kinds without communication have no axes."""

    SLICE = "slice"
    """Each rank keeps a slice of its shard."""
    PARTITION = "partition"
    """Values become partial values that reduce to the original: each rank keeps its share and fills the rest with the
    reduction's neutral element (replicated axis: rank 0 keeps the values; sharded axis: each rank keeps its shard)."""
    ALL_GATHER = "all-gather"
    """Each rank of a group receives the shards of all ranks in the group."""
    ALL_TO_ALL = "all-to-all"
    """Each rank of a group sends every other rank the elements of that rank's new shard."""
    PERMUTE = "permute"
    """Each rank sends its full shard to one rank."""
    REDUCE_SCATTER = "reduce-scatter"
    """Partial values are reduced, and each element ends on the one rank of the group that holds it in its new shard."""
    ALL_REDUCE = "all-reduce"
    """Partial values are reduced, and all ranks of the group hold the result."""


LOCAL = frozenset({StepKind.SLICE, StepKind.PARTITION})
"""Kinds without communication."""

REDUCING = frozenset({StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE})
"""Kinds that reduce partial values."""

DTYPE_BYTES = {
    "fp64": 8, "int64": 8, "complex64": 8, "complex128": 16,
    "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2, "int16": 2,
    "fp8": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Element size in bytes by dtype name."""

_OTHER_NAMES = {
    "float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "bfloat16": "bf16",
    "float16": "fp16", "half": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
"""PyTorch's dtype names, for suggestions in errors."""


def dtype_bytes(dtype: str) -> int:
    """Return the element size of a dtype in bytes.

    Raises:
        LayoutError: if `dtype` is not a key of `DTYPE_BYTES`.
    """
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        name = str(dtype).removeprefix("torch.").lower()
        name = _OTHER_NAMES.get(name, name)
        fix = f"dtype={name if name in DTYPE_BYTES else 'bf16'!r}"
        raise LayoutError(f"{dtype!r} is not a dtype", where="dtype", rule=", ".join(DTYPE_BYTES), fix=fix)
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Step:
    """Step of a plan from layout `src` to `dst`. Byte counts, of other ranks' data, are maxima over ranks.

    Attributes:
        axes: the mesh axes whose ranks exchange, ascending; () for a local kind.
        time_us: time by the cost model.
        live_bytes: bytes live during the step: the plan's source, which the caller still holds, the step's source if it
            is a different tensor, the staging buffers, and the step's result.
        rounds: number of consecutive collectives that the exchange is split into to save memory.
    """

    kind: StepKind
    axes: tuple[int, ...]
    src: Layout
    dst: Layout
    bytes_sent: int
    bytes_received: int
    time_us: float
    live_bytes: int
    rounds: int = 1


@dataclass(frozen=True)
class ReshardPlan:
    """Plan for redistributing a tensor from layout `src` to `dst`.

    Attributes:
        dtype: a key of `DTYPE_BYTES`.
        steps: the steps in order; empty if nothing changes.
        bytes_sent: total bytes sent by the rank that sends most.
        bytes_received: total bytes received by the rank that receives most.
        lower_bound_bytes: bytes that some rank must receive with any method: the most that any rank lacks and, if
            values are reduced, at least the average over ranks of the transfers needed to reduce and replicate.
        peak_bytes: peak bytes live on any rank, including source and result.
        time_us: time by the cost model.
    """

    src: Layout
    dst: Layout
    dtype: str
    steps: tuple[Step, ...]
    bytes_sent: int
    bytes_received: int
    lower_bound_bytes: int
    peak_bytes: int
    time_us: float

    def to_json(self) -> str:
        """Serialize the plan to JSON; `from_json` is the inverse."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ReshardPlan:
        """Read a plan written by `to_json`.

        Raises:
            LayoutError: if `text` is not a plan.
        """

        def make(fields: dict[str, Any]) -> ReshardPlan:
            steps = tuple(
                Step(**{**step, **ends(step), "kind": StepKind(step["kind"]), "axes": tuple(step["axes"])})
                for step in fields["steps"]
            )
            return ReshardPlan(**{**fields, **ends(fields), "steps": steps})

        def ends(fields: dict[str, Any]) -> dict[str, Layout]:
            return {name: layout_from(fields[name]) for name in ("src", "dst")}

        return read_plan(text, make)


def check_one_tensor(src: Layout, dst: Layout) -> None:
    """Raise `LayoutError` if two layouts have different tensor shapes."""
    if src.shape != dst.shape:
        raise LayoutError(
            f"the source layout is of shape {list(src.shape)}, the destination layout of {list(dst.shape)}",
            where="dst",
            rule="both layouts must have the same tensor shape",
            fix=f"shape={src.shape} for both",
        )


def read_plan(text: str, make: Callable[[dict[str, Any]], T]) -> T:
    """Parse JSON written by a plan's `to_json` and build the plan from its fields with `make`.

    Raises:
        LayoutError: if `text` is not a plan.
    """
    try:
        return make(json.loads(text))
    except (KeyError, TypeError, ValueError) as e:
        raise LayoutError(f"not a plan: {e!r}", rule="from_json reads what to_json wrote", fix="plan again") from e


def layout_from(fields: dict[str, Any]) -> Layout:
    """Build a layout from JSON fields written by `asdict`."""
    return Layout(
        tuple(fields["shape"]),
        tuple(fields["axis_sizes"]),
        tuple(tuple(Split(**split) for split in splits) for splits in fields["splits"]),
        tuple(None if name is None else Reduction(name) for name in fields["partial"]),
    )
