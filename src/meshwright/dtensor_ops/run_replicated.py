"""Running an operator on whole copies: gather its inputs, compute on every rank, keep each rank's piece.

Every rank computes the same from the same values, so results are laid out by slicing, without a message. What an
operator writes in place is written to copies first: an operator that fails leaves its inputs as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshwright.dtensor_ops.private import (
    OpOverload,
    as_copies,
    as_dtensor_like,
    dtensor_of,
    gathered,
    is_alias,
    is_cut,
    own_tensor,
    schema_of,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from meshwright.dtensor_ops.refused_ops import mesh_refused, partial_refused, random_refused, shape_refused
from meshwright.reshard.dtensor import new_dtensor, spec_of
from meshwright.reshard.dtensor.placements import has_layout
from meshwright.reshard.dtensor.redistribute_local import redistribute_detached

Pairs = list[tuple[Tensor, Tensor]]
"""Tensors an operator was called with, and the whole ones it is run on."""


@dataclass(slots=True)
class Call:
    """An operator and its arguments."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """All of its tensors, those in lists included."""
        found: list[Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, list | tuple):
                found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return found

    def dtensors(self) -> list[DTensor]:
        """Those of its tensors that lie on a mesh."""
        return [tensor for tensor in self.tensors() if isinstance(tensor, DTensor)]

    def written(self) -> list[Tensor]:
        """The tensors that it writes to: in place, or as `out`."""
        if not schema_of(self.operator).is_mutable:
            return []
        found: list[Any] = []
        for place, argument in enumerate(schema_of(self.operator).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[place] if place < len(self.args) else self.kwargs.get(argument.name)
                found += tree_leaves(value)
        return [tensor for tensor in found if isinstance(tensor, Tensor)]

    def mesh(self) -> DeviceMesh:
        """The mesh of its DTensors.

        Raises:
            OperatorError: they have several.
        """
        meshes = [tensor.device_mesh for tensor in self.dtensors()]
        if any(mesh != meshes[0] for mesh in meshes):
            raise mesh_refused(self.operator)
        return meshes[0]

    def run(self) -> Any:
        """What it returns."""
        return self.operator(*self.args, **self.kwargs)


Run = Callable[[Call], Any]
"""Returns what an operator returns."""


def gather_bytes(tensor: DTensor) -> int:
    """Bytes that a rank receives to have the whole tensor: others' pieces, after partial values were added up."""
    pieces = parts = 1
    for axis, placement in enumerate(tensor.placements):
        size = tensor.device_mesh.size(axis)
        if is_cut(placement):
            pieces *= size
        elif isinstance(placement, Partial):
            parts *= size
    whole = tensor.numel() * tensor.element_size()
    piece = math.ceil(whole / pieces)
    return whole - piece + math.ceil(2 * piece * (parts - 1) / parts)


def run_on_copies(call: Call, given: Mapping[int, Tensor] | None = None) -> Any:
    """What `call` returns, computed from whole inputs and laid out as the input of its shape.

    Args:
        call: an operator and its arguments.
        given: whole tensors by the `id` of arguments, to be used for these; what is written there stays there.

    Raises:
        OperatorError: it draws random numbers, or would write where it can't.
    """
    given = given or {}
    mesh, written = call.mesh(), {id(tensor) for tensor in call.written()}
    if any(isinstance(tensor, DTensor) and not can_be_written(tensor) for tensor in call.written()):
        raise partial_refused(call.operator)
    leaves, spec = tree_flatten((call.args, call.kwargs))
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in pairs:
                whole = given[id(leaf)] if id(leaf) in given else _whole(leaf, is_written=id(leaf) in written)
                pairs[id(leaf)] = leaf, whole
        args, kwargs = tree_unflatten([pairs[id(x)][1] if isinstance(x, Tensor) else x for x in leaves], spec)
        result = _without_drawing(Call(call.operator, args, kwargs))
        changed = [pair for key, pair in pairs.items() if key in written]
        _check_fits(call.operator, changed)
        for tensor, whole in changed:
            if id(tensor) in given:
                continue
            (own_tensor(tensor) if isinstance(tensor, DTensor) else tensor).copy_(piece_like(whole, tensor))
        back = {id(whole): tensor for tensor, whole in changed}
        return tree_map_only(Tensor, lambda x: back[id(x)] if id(x) in back else _laid_out(x, call, mesh), result)


def _whole(tensor: Tensor, *, is_written: bool) -> Tensor:
    """The whole tensor on this rank; a copy of its own if the operator writes to it."""
    if not isinstance(tensor, DTensor):
        return tensor.clone() if is_written else tensor
    whole = _gathered_eight_bits(tensor) if _has_eight_bits(tensor) else gathered(tensor)
    if is_alias(whole, own_tensor(tensor)):
        return whole.clone() if is_written else whole
    return _with_strides(whole, tensor.stride())


def _has_eight_bits(tensor: DTensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 1


def _gathered_eight_bits(tensor: DTensor) -> Tensor:
    """gloo moves no numbers of 8 bits but integers, and adds up none in their place."""
    if any(placement.is_partial() for placement in tensor.placements):
        local = own_tensor(tensor).float()
        return gathered(new_dtensor(local, tensor.device_mesh, tensor.placements, None, like=tensor)).to(tensor.dtype)
    return gathered(as_dtensor_like(tensor, own_tensor(tensor).view(torch.uint8), tensor)).view(tensor.dtype)


def can_be_written(tensor: DTensor) -> bool:
    """A whole value can be laid out as it is, also as parts of a sum; not so in placements that only operators make."""
    return has_layout(tensor.placements)


def _with_strides(whole: Tensor, strides: tuple[int, ...]) -> Tensor:
    """It, or a copy that lies in memory as on one device: some operators' results depend on that."""
    if whole.stride() == strides or any(stride == 0 for stride in strides):
        return whole
    return torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=whole.device).copy_(whole)


def _without_drawing(call: Call) -> Any:
    """What an operator on plain tensors returns, unless it drew random numbers for it."""
    if torch.Tag.nondeterministic_seeded not in call.operator.tags:
        return call.run()
    if isinstance(call.kwargs.get("generator"), torch.Generator):
        raise random_refused(call.operator)
    devices = sorted({tensor.device.index for tensor in call.tensors() if tensor.is_cuda})
    with torch.random.fork_rng(devices):
        before = _random_states(devices)
        result = call.run()
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(devices), strict=True)):
            raise random_refused(call.operator)
    return result


def _random_states(devices: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _check_fits(operator: OpOverload, changed: Pairs) -> None:
    for tensor, whole in changed:
        if tensor.shape != whole.shape:
            raise shape_refused(operator, tuple(whole.shape), tuple(tensor.shape))


def _laid_out(whole: Tensor, call: Call, mesh: DeviceMesh) -> Tensor:
    """A result as a DTensor; one that is sparse stays as it is, whole on every rank."""
    if whole.layout is not torch.strided:
        return whole
    for like in call.dtensors():
        if like.shape == whole.shape and any(is_cut(p) for p in like.placements):
            placements = tuple(Replicate() if p.is_partial() else p for p in like.placements)
            return _laid_as(whole, mesh, placements, like)
    return as_copies(whole, mesh)


def piece_like(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of `whole`, laid out as `like`."""
    if not isinstance(like, DTensor) or all(placement.is_replicate() for placement in like.placements):
        return whole
    return own_tensor(_laid_as(whole, like.device_mesh, like.placements, like))


def _laid_as(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], like: DTensor) -> DTensor:
    """With memory of its own, and the order of cuts of `like`."""
    laid = redistribute_detached(as_copies(whole, mesh), placements, spec_of(like).shard_order)
    return dtensor_of(own_tensor(laid).clone(), spec_of(laid)) if is_alias(own_tensor(laid), whole) else laid
