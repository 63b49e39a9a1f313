"""Operators that are no function of their inputs' values, and what is said of them.

A tensor that lies on a mesh has values and no memory of its own that an operator could look at: what reads or changes
storage cannot be computed from the gathered values. Nor can what draws random numbers: each rank would draw its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshwright.dtensor_ops.private import OpOverload, schema_of
from meshwright.errors import InputError, MeshwrightError

STORAGE = frozenset({
    "as_strided_", "set_", "set", "resize", "resize_",
    "resize_as", "resize_as_", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
    "new_empty_strided", "data_ptr", "is_set_to", "storage_offset", "record_stream",
})  # fmt: skip
STRIDES = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
"""Operators that ask for memory: its addresses, its strides, or whatever lies in it."""


class OperatorError(InputError):
    """An operator that cannot run on a DTensor as it was called."""


def name_of(operator: OpOverload) -> str:
    """`aten.cdist.default`, as PyTorch writes it."""
    return str(operator)


def is_storage(operator: OpOverload, tensors: Sequence[Tensor]) -> bool:
    """It looks at memory, not at values. Strides into tensors that are dense and in order only choose values."""
    name = schema_of(operator).name.rpartition("::")[2]
    if name in STRIDES:
        return not all(tensor.is_contiguous() and tensor.storage_offset() == 0 for tensor in tensors)
    return name in STORAGE


def _refused(what: str, *, rule: str, fix: str) -> MeshwrightError:
    return OperatorError(what, where="replicate_fallback", rule=rule, fix=fix)


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
    """What is said of writing to partial values that only an operator can make."""
    return _refused(
        f"{name_of(operator)} writes to a DTensor of masked or normed partial values",
        rule="a result is written where whole values are held, or parts that add up to them",
        fix="x.redistribute(placements=…) without Partial first",
    )


def turned_refused(operator: OpOverload) -> MeshwrightError:
    """What is said of turning a view in place, of a tensor that has a gradient."""
    return _refused(
        f"{name_of(operator)} turns a view in place, and its gradient would come back unturned",
        rule="autograd makes a view of a DTensor anew as it was first made",
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
