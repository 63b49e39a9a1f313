"""Run an operator replicated: gather its inputs, compute on every rank, keep each rank's shard of the result.

All ranks compute the same result from the same values, so sharding the result is a local slice without communication.
In-place writes go to copies first, so an operator that fails leaves its inputs unchanged. Refused are operators on
storage, which a DTensor has no single one of, and random operators, since each rank would draw its own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshwright.dtensor_ops.private import (
    OpOverload,
    as_replicated,
    dtensor_like,
    gather_full,
    is_alias,
    is_shard,
    local_tensor,
    schema_of,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    wrap_local,
)
from meshwright.errors import InputError
from meshwright.reshard.dtensor import new_dtensor, spec_of
from meshwright.reshard.dtensor.placements import has_layout
from meshwright.reshard.dtensor.redistribute import redistribute_detached

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


def is_storage(operator: OpOverload, tensors: Sequence[Tensor]) -> bool:
    """Return True if an operator depends on storage; strides into contiguous tensors only select values."""
    name = schema_of(operator).name.rpartition("::")[2]
    if name in STRIDES:
        return not all(tensor.is_contiguous() and tensor.storage_offset() == 0 for tensor in tensors)
    return name in STORAGE


def storage_error(name: str) -> OperatorError:
    return ImpureOperatorError(
        f"{name} depends on the memory of its inputs, not only on their values",
        rule="an operator without a sharding rule is computed from the gathered values",
        fix="call it on x.to_local(), for the local shard, or on x.full_tensor()",
        where=CONTEXT,
    )


def random_error(operator: OpOverload) -> OperatorError:
    return ImpureOperatorError(
        f"{operator} draws random numbers, which would differ between ranks",
        rule="an operator without a sharding rule must give the same result on all ranks",
        fix="draw with torch.distributed.tensor.rand or randn, or draw one plain tensor and use distribute_tensor",
        where=CONTEXT,
    )


@dataclass(slots=True)
class OpCall:
    """Operator with the arguments of a call."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Return all tensor arguments, including those inside lists."""
        return tensors_in(self.args, self.kwargs)

    def dtensors(self) -> list[DTensor]:
        return [tensor for tensor in self.tensors() if isinstance(tensor, DTensor)]

    def written_tensors(self) -> list[Tensor]:
        """Return the tensors that the operator writes to, in place or as `out`."""
        if not schema_of(self.operator).is_mutable:
            return []
        targets: list[Any] = []
        for index, argument in enumerate(schema_of(self.operator).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[index] if index < len(self.args) else self.kwargs.get(argument.name)
                targets += tree_leaves(value)
        return [tensor for tensor in targets if isinstance(tensor, Tensor)]

    def mesh(self) -> DeviceMesh:
        """Return the mesh of the DTensor arguments.

        Raises:
            OperatorError: the arguments are on several meshes.
        """
        meshes = [tensor.device_mesh for tensor in self.dtensors()]
        if any(mesh != meshes[0] for mesh in meshes):
            raise OperatorError(
                f"{self.operator} has inputs on different meshes",
                where=CONTEXT,
                rule="all inputs must be on the same mesh",
                fix="redistribute them to one mesh first",
            )
        return meshes[0]

    def run(self) -> Any:
        return self.operator(*self.args, **self.kwargs)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return all tensors among arguments, including those inside lists."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors


RunOp = Callable[[OpCall], Any]
"""Function that computes the result of an operator call."""


def gather_bytes(tensor: DTensor) -> int:
    """Return the bytes that each rank receives to gather a tensor, including the reduction of partial values."""
    num_shards = num_partials = 1
    for axis, placement in enumerate(tensor.placements):
        size = tensor.device_mesh.size(axis)
        if is_shard(placement):
            num_shards *= size
        elif isinstance(placement, Partial):
            num_partials *= size
    full_bytes = tensor.numel() * tensor.element_size()
    shard_bytes = math.ceil(full_bytes / num_shards)
    return full_bytes - shard_bytes + math.ceil(2 * shard_bytes * (num_partials - 1) / num_partials)


def run_replicated(call: OpCall, full_by_id: Mapping[int, Tensor] | None = None) -> Any:
    """Compute `call` from full inputs, and place the result like a sharded input of the same shape.

    Args:
        call: the operator call.
        full_by_id: full tensors for some arguments, by `id`; writes to these are not copied back.

    Raises:
        OperatorError: the operator draws random numbers, or its output tensor cannot be written to.
    """
    full_by_id = full_by_id or {}
    mesh, written = call.mesh(), {id(tensor) for tensor in call.written_tensors()}
    if any(isinstance(tensor, DTensor) and not has_layout(tensor.placements) for tensor in call.written_tensors()):
        raise OperatorError(
            f"{call.operator} writes to a DTensor with masked or norm partial values",
            where=CONTEXT,
            rule="only plain Partial, Shard and Replicate placements can be written to",
            fix="redistribute x to placements without Partial first",
        )
    leaves, spec = tree_flatten((call.args, call.kwargs))
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in pairs:
                is_written = id(leaf) in written
                full = full_by_id[id(leaf)] if id(leaf) in full_by_id else _gather(leaf, is_written=is_written)
                pairs[id(leaf)] = leaf, full
        args, kwargs = tree_unflatten([pairs[id(x)][1] if isinstance(x, Tensor) else x for x in leaves], spec)
        result = _run_deterministic(OpCall(call.operator, args, kwargs))
        changed = [pair for key, pair in pairs.items() if key in written]
        for tensor, full in changed:
            if tensor.shape != full.shape:
                raise OperatorError(
                    f"{call.operator} writes a result of shape {tuple(full.shape)} to a DTensor of shape "
                    f"{tuple(tensor.shape)}",
                    where=CONTEXT,
                    rule="a DTensor keeps its shape",
                    fix="use the out-of-place operator",
                )
        for tensor, full in changed:
            if id(tensor) in full_by_id:
                continue
            (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).copy_(shard_like(full, tensor))
        originals = {id(full): tensor for tensor, full in changed}
        return tree_map_only(
            Tensor, lambda x: originals[id(x)] if id(x) in originals else _place_result(x, call, mesh), result
        )


def _gather(tensor: Tensor, *, is_written: bool) -> Tensor:
    """Gather the full tensor on this rank, as a copy if the operator writes to it."""
    if not isinstance(tensor, DTensor):
        return tensor.clone() if is_written else tensor
    is_float8 = tensor.is_floating_point() and tensor.element_size() == 1
    full = _gather_float8(tensor) if is_float8 else gather_full(tensor)
    if is_alias(full, local_tensor(tensor)):
        return full.clone() if is_written else full
    # Of the single-device strides, since the results of some operators depend on strides.
    if full.stride() == tensor.stride() or any(stride == 0 for stride in tensor.stride()):
        return full
    return torch.empty_strided(full.shape, tensor.stride(), dtype=full.dtype, device=full.device).copy_(full)


def _gather_float8(tensor: DTensor) -> Tensor:
    """Gather a float8 tensor as bytes or, if partial, as float32, because gloo does not support float8."""
    if any(placement.is_partial() for placement in tensor.placements):
        local = local_tensor(tensor).float()
        full = gather_full(new_dtensor(local, tensor.device_mesh, tensor.placements, None, like=tensor))
        return full.to(tensor.dtype)
    return gather_full(dtensor_like(tensor, local_tensor(tensor).view(torch.uint8), tensor)).view(tensor.dtype)


def _run_deterministic(call: OpCall) -> Any:
    """Run an operator on plain tensors; raise if it draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in call.operator.tags:
        return call.run()
    if isinstance(call.kwargs.get("generator"), torch.Generator):
        raise random_error(call.operator)
    devices = sorted({tensor.device.index for tensor in call.tensors() if tensor.is_cuda})
    with torch.random.fork_rng(devices):
        before = _random_states(devices)
        result = call.run()
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(devices), strict=True)):
            raise random_error(call.operator)
    return result


def _random_states(devices: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _place_result(full: Tensor, call: OpCall, mesh: DeviceMesh) -> Tensor:
    """Convert a result to a DTensor; a sparse result stays a plain tensor."""
    if full.layout is not torch.strided:
        return full
    for like in call.dtensors():
        if like.shape == full.shape and any(is_shard(p) for p in like.placements):
            placements = tuple(Replicate() if p.is_partial() else p for p in like.placements)
            return _place_like(full, mesh, placements, like)
    return as_replicated(full, mesh)


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of `full`, placed like `like`."""
    if not isinstance(like, DTensor) or all(placement.is_replicate() for placement in like.placements):
        return full
    return local_tensor(_place_like(full, like.device_mesh, like.placements, like))


def _place_like(full: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], like: DTensor) -> DTensor:
    """Distribute `full` with these placements and the shard order of `like`, without sharing its memory."""
    placed = redistribute_detached(as_replicated(full, mesh), placements, spec_of(like).shard_order)
    return wrap_local(local_tensor(placed).clone(), spec_of(placed)) if is_alias(local_tensor(placed), full) else placed
