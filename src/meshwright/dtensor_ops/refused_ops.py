"""Operators that cannot fall back to replicated tensors, and the errors that they raise.

A DTensor has no single storage, so operators that inspect or change storage cannot be computed from gathered values.
Neither can random operators, since each rank would draw its own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshwright.dtensor_ops.private import OpOverload, schema_of
from meshwright.errors import InputError, MeshwrightError

CONTEXT = "replicate_fallback"
STORAGE = frozenset({
    "as_strided_", "set_", "set", "resize", "resize_",
    "resize_as", "resize_as_", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
    "new_empty_strided", "data_ptr", "is_set_to", "storage_offset", "record_stream",
})  # fmt: skip
STRIDES = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
"""Operators that access storage by strides; `STORAGE` lists those that access it in other ways."""


class OperatorError(InputError, RuntimeError):
    """Error for an operator call that cannot run on DTensors; also a RuntimeError, as PyTorch's own refusals are."""


class ImpureOperatorError(OperatorError):
    """Error for an operator whose result depends not only on its inputs' values but on storage or random numbers."""


def name_of(operator: OpOverload) -> str:
    """Return the operator's name as PyTorch writes it, such as `aten.cdist.default`."""
    return str(operator)


def is_storage(operator: OpOverload, tensors: Sequence[Tensor]) -> bool:
    """Return True if an operator depends on storage; strides into contiguous tensors only select values."""
    name = schema_of(operator).name.rpartition("::")[2]
    if name in STRIDES:
        return not all(tensor.is_contiguous() and tensor.storage_offset() == 0 for tensor in tensors)
    return name in STORAGE


def _operator_error(what: str, *, rule: str, fix: str) -> MeshwrightError:
    return OperatorError(what, where=CONTEXT, rule=rule, fix=fix)


def storage_error(name: str) -> MeshwrightError:
    """Return the error for an operator on storage."""
    return ImpureOperatorError(
        f"{name} depends on the memory of its inputs, not only on their values",
        rule="an operator without a sharding rule is computed from the gathered values",
        fix="call it on x.to_local(), for the local shard, or on x.full_tensor()",
        where=CONTEXT,
    )


def random_error(operator: OpOverload) -> MeshwrightError:
    """Return the error for an operator that draws random numbers."""
    return ImpureOperatorError(
        f"{name_of(operator)} draws random numbers, which would differ between ranks",
        rule="an operator without a sharding rule must give the same result on all ranks",
        fix="draw with torch.distributed.tensor.rand or randn, or draw one plain tensor and use distribute_tensor",
        where=CONTEXT,
    )


def shape_error(operator: OpOverload, result: tuple[int, ...], output: tuple[int, ...]) -> MeshwrightError:
    """Return the error for a result whose shape differs from its output tensor."""
    return _operator_error(
        f"{name_of(operator)} writes a result of shape {result} to a DTensor of shape {output}",
        rule="a DTensor keeps its shape",
        fix="use the out-of-place operator",
    )


def partial_write_error(operator: OpOverload) -> MeshwrightError:
    """Return the error for a write to masked or norm-partial values."""
    return _operator_error(
        f"{name_of(operator)} writes to a DTensor with masked or norm partial values",
        rule="only plain Partial, Shard and Replicate placements can be written to",
        fix="redistribute x to placements without Partial first",
    )


def inplace_view_error(operator: OpOverload) -> MeshwrightError:
    """Return the error for an in-place view operator on a view under autograd."""
    return _operator_error(
        f"{name_of(operator)} transforms a view in place, which its gradient would not undo",
        rule="autograd replays a view of a DTensor as it was first created",
        fix="use the out-of-place operator",
    )


def mesh_error(operator: OpOverload) -> MeshwrightError:
    """Return the error for inputs on different meshes."""
    return _operator_error(
        f"{name_of(operator)} has inputs on different meshes",
        rule="all inputs must be on the same mesh",
        fix="redistribute them to one mesh first",
    )


def plain_tensor_error(name: str, shape: tuple[int, ...]) -> MeshwrightError:
    """Return the error for a plain tensor that differs between ranks."""
    return _operator_error(
        f"{name} mixes DTensors and a plain tensor of shape {shape} whose values differ between ranks",
        rule="a plain tensor is treated as replicated, so all ranks must have the same values",
        fix="DTensor.from_local(x, mesh, placements), which declares how it is sharded",
    )
