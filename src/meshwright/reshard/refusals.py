"""Operators that are no function of their inputs' values, and what is said of them.

A tensor that lies on a mesh has values and no memory of its own that an operator could look at: what reads or changes
storage cannot be computed from the gathered values. Nor can what draws random numbers: each rank would draw its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshwright.errors import InputError, MeshwrightError
from meshwright.reshard.private import OpOverload

STORAGE = frozenset({
    "as_strided_", "set_", "set", "resize", "resize_",
    "resize_as", "resize_as_", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
    "new_empty_strided", "data_ptr", "is_set_to", "storage_offset", "record_stream",
})  # fmt: skip
STRIDES = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
"""Operators that ask for memory: its addresses, its strides, or whatever lies in it."""
CONTEXTS = "for_dtensor, replicate_fallback"
"""Where orders of cuts and views are kept to."""


class OperatorError(InputError):
    """An operator that cannot run on a DTensor as it was called."""


def name_of(operator: OpOverload) -> str:
    """`aten.cdist.default`, as PyTorch writes it."""
    return str(operator)


def is_storage(operator: OpOverload, tensors: Sequence[Tensor]) -> bool:
    """It looks at memory, not at values. Strides into tensors that are dense and in order only choose values."""
    name = operator._schema.name.rpartition("::")[2]
    if name in STRIDES:
        return not all(tensor.is_contiguous() and tensor.storage_offset() == 0 for tensor in tensors)
    return name in STORAGE


def _refused(what: str, *, rule: str, fix: str, where: str = "replicate_fallback") -> MeshwrightError:
    return OperatorError(what, where=where, rule=rule, fix=fix)


def storage_refused(name: str) -> MeshwrightError:
    """What is said of an operator on storage."""
    return _refused(
        f"{name} is not a function of its inputs' values: it looks at their memory",
        rule="an operator without a sharding rule is computed from the gathered values",
        fix="call it on x.to_local(), for this rank's piece, or on x.full_tensor()",
    )


def random_refused(operator: OpOverload) -> MeshwrightError:
    """What is said of an operator that draws random numbers."""
    return _refused(
        f"{name_of(operator)} is not a function of its inputs' values: it draws random numbers",
        rule="ranks draw by themselves, so their copies or pieces would not be of one tensor",
        fix="draw with torch.distributed.tensor.rand or randn, or draw one plain tensor and use distribute_tensor",
    )


def shape_refused(operator: OpOverload, found: tuple[int, ...], given: tuple[int, ...]) -> MeshwrightError:
    """What is said of a result that does not fit what it is written to."""
    return _refused(
        f"{name_of(operator)} writes a result of shape {found} to a DTensor of shape {given}",
        rule="a DTensor keeps its shape",
        fix="use the operator that returns a new tensor",
    )


def partial_refused(operator: OpOverload) -> MeshwrightError:
    """What is said of writing to partial values."""
    return _refused(
        f"{name_of(operator)} writes to a DTensor of partial values",
        rule="a result is written where whole values are held",
        fix="x.redistribute(placements=…) without Partial first",
    )


def view_refused(operator: OpOverload) -> MeshwrightError:
    """What is said of turning, in place, a view that shares no memory with its base."""
    return _refused(
        f"{name_of(operator)} turns a view in place that was gathered",
        where=CONTEXTS,
        rule="a view that lies apart from its base keeps its shape",
        fix="use the operator that returns a new tensor",
    )


def turned_refused(operator: OpOverload) -> MeshwrightError:
    """What is said of changing the shape, in place, of a tensor whose cuts have an order of their own."""
    return _refused(
        f"{name_of(operator)} turns a DTensor in place whose shard_order is not that of the mesh's axes",
        where=CONTEXTS,
        rule="such a tensor keeps its shape: the order is of its dims",
        fix="use the operator that returns a new tensor",
    )


def mesh_refused(operator: OpOverload) -> MeshwrightError:
    """What is said of inputs on several meshes."""
    return _refused(
        f"{name_of(operator)} has DTensors of several meshes",
        rule="an operator's inputs lie on one mesh",
        fix="bring them to one mesh first",
    )


def plain_refused(operator: OpOverload, shape: tuple[int, ...]) -> MeshwrightError:
    """What is said of a plain tensor that is not the same on all ranks."""
    return _refused(
        f"{name_of(operator)} has DTensors and a plain tensor of shape {shape} whose values differ between ranks",
        rule="a plain tensor is taken as a copy only where every rank has the same values",
        fix="DTensor.from_local(x, mesh, placements), which says what the pieces are",
    )
