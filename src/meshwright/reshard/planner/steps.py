"""A plan that moves a tensor from one layout to another: a chain of steps, as an immutable value.

A step is given by its kind, the mesh axes whose ranks take part together (merged into one group), and the layouts
before and after. That is all that the executor needs, because one rule says who sends what:

  [Note: owners] A rank receives each element of its new part from the ranks whose coordinates are, axis by axis:
  - on an axis outside `axes`: its own;
  - on an axis that holds copies before the step: its own;
  - on an axis that cuts a tensor dim before the step: that of the part with the element;
  - on an axis with partial values before the step and none after it: all of them, in ascending order, and the values
    are reduced in that order (the last axis first), so all copies come out bitwise equal.

What a rank has itself is not sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar

from meshwright.errors import LayoutError
from meshwright.mesh.layout import Layout
from meshwright.mesh.reduction import Reduction
from meshwright.mesh.shard_intervals import Split

T = TypeVar("T")


class StepKind(StrEnum):
    """What a step does. Kinds without communication have no axes."""

    SLICE = "slice"
    """Each rank keeps a part of what it has."""
    PARTITION = "partition"
    """Values become partial ones whose reduction they are: each rank sets what is not its share to the reduction's
    neutral element (copies: rank 0 of the axis keeps them; a part: the rest of its tensor is filled)."""
    ALL_GATHER = "all-gather"
    """Every rank of a group ends with all that the group's ranks have."""
    ALL_TO_ALL = "all-to-all"
    """Every rank of a group sends each other one what that one is to have."""
    PERMUTE = "permute"
    """Every rank's whole part goes to one rank."""
    REDUCE_SCATTER = "reduce-scatter"
    """Partial values are reduced, each element on the one rank of the group that is to have it."""
    ALL_REDUCE = "all-reduce"
    """Partial values are reduced, and all ranks of the group have the result."""


LOCAL = frozenset({StepKind.SLICE, StepKind.PARTITION})
"""Kinds without communication."""

REDUCING = frozenset({StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE})
"""Kinds that reduce partial values."""

DTYPE_BYTES = {
    "fp64": 8, "int64": 8, "complex64": 8, "complex128": 16,
    "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2, "int16": 2,
    "fp8": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element by the names that plans use."""

_OTHER_NAMES = {
    "float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "bfloat16": "bf16",
    "float16": "fp16", "half": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
"""What PyTorch calls them; for an error's fix."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        LayoutError: there is no such number format.
    """
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        name = str(dtype).removeprefix("torch.").lower()
        name = _OTHER_NAMES.get(name, name)
        fix = f"dtype={name if name in DTYPE_BYTES else 'bf16'!r}"
        raise LayoutError(f"{dtype!r} is not a dtype", where="dtype", rule=", ".join(DTYPE_BYTES), fix=fix)
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Step:
    """One step of a plan. Counts are those of the rank with the most.

    Attributes:
        kind: what it does.
        axes: the mesh axes, ascending, whose ranks exchange; () for a local kind.
        src: the layout before.
        dst: the layout after.
        bytes_sent: to other ranks.
        bytes_received: from other ranks.
        time_us: by the cost model.
        live_bytes: what is held at once while the step runs: the plan's source, which the caller still has, the step's
            own source where that is another tensor, what is packed and received and not yet unpacked, and its result.
        rounds: over how many collectives, one after the other, the exchange is spread to hold less at once.
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
    """How to get from `src` to `dst`.

    Attributes:
        src: the layout before.
        dst: the layout after.
        dtype: name of the number format, one of `DTYPE_BYTES`.
        steps: in order; none when nothing has to change.
        bytes_sent: by the rank that sends most, over all steps.
        bytes_received: by the rank that receives most, over all steps.
        lower_bound_bytes: what a rank must receive by any method: the most that any rank lacks, and where values are
            partial also the average over ranks of all the transfers that reducing and copying need.
        peak_bytes: the most that any rank holds at once, source and result included.
        time_us: by the cost model.
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
        """The plan as JSON; `from_json` is its inverse."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ReshardPlan:
        """The plan that `to_json` wrote.

        Raises:
            LayoutError: it is not one.
        """

        def make(fields: dict[str, Any]) -> ReshardPlan:
            layouts = {name: layout_from(fields[name]) for name in ("src", "dst")}
            return ReshardPlan(**{**fields, **layouts, "steps": tuple(_step(step) for step in fields["steps"])})

        return read_plan(text, make)


def check_one_tensor(src: Layout, dst: Layout) -> None:
    """Both are layouts of one tensor.

    Raises:
        LayoutError: their shapes differ.
    """
    if src.shape != dst.shape:
        raise LayoutError(
            f"the source is of shape {list(src.shape)}, the destination of {list(dst.shape)}",
            where="dst",
            rule="a plan moves one tensor",
            fix=f"shape={src.shape} for both",
        )


def read_plan(text: str, make: Callable[[dict[str, Any]], T]) -> T:
    """What `make` makes of the fields that a plan's `to_json` wrote.

    Raises:
        LayoutError: they are not those of a plan.
    """
    try:
        return make(json.loads(text))
    except (KeyError, TypeError, ValueError) as e:
        raise LayoutError(f"not a plan: {e!r}", rule="from_json reads what to_json wrote", fix="plan anew") from e


def layout_from(fields: dict[str, Any]) -> Layout:
    """The layout of which `asdict` made these fields, through JSON."""
    return Layout(
        tuple(fields["shape"]),
        tuple(fields["axis_sizes"]),
        tuple(tuple(Split(**split) for split in splits) for splits in fields["splits"]),
        tuple(None if name is None else Reduction(name) for name in fields["partial"]),
    )


def _step(fields: dict[str, Any]) -> Step:
    layouts = {"src": layout_from(fields["src"]), "dst": layout_from(fields["dst"])}
    return Step(**{**fields, **layouts, "kind": StepKind(fields["kind"]), "axes": tuple(fields["axes"])})
