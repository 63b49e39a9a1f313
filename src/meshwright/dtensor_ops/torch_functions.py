"""Interception by `replicate_fallback` of torch functions on DTensors before they decompose into operators.

Some functions read memory before they dispatch any operator, and einsum turns into matrix products of flattened dims,
which DTensor can't flatten without a gather where they are sharded unevenly: einsums run on local shards instead.
DTensor's own `__torch_function__`, which does nothing, is replaced while the fallback is active on some thread. A
function mode would also intercept the functions of plain tensors, which takes about a tenth of a training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshwright.dtensor_ops.private import has_default_order, shard_dim, tree_leaves, tree_map_only, with_dim
from meshwright.dtensor_ops.run_replicated import storage_error
from meshwright.reshard.dtensor import Patches, active_interceptor, local_of, run_torch_function

EinsumTerms = tuple[list[str], str]
"""Dim labels of each operand and of the result."""


def _refuse_pointer(*args: Any) -> Any:
    raise storage_error("Tensor.data_ptr")  # it returns 0 for a DTensor


def _read_full(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the full values to the host; PyTorch rejects tensor subclasses."""
    return func(args[0].full_tensor(), *args[1:])


def _split_at_full_index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that reads an index tensor on the host with the full index."""
    full_args, full_kwargs = tree_map_only(DTensor, lambda index: index.full_tensor(), (args[1:], kwargs))
    return run_torch_function(func, (args[0], *full_args), full_kwargs)


def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    has_dtensor = any(isinstance(x, DTensor) for x in tree_leaves(args))
    result = einsum_on_shards(*args, **kwargs) if has_dtensor else None
    return active_interceptor().run_function(func, args, kwargs) if result is None else result


FUNCTIONS = {
    Tensor.data_ptr: _refuse_pointer,
    Tensor.tolist: _read_full,
    Tensor.__format__: _read_full,
    torch.tensor_split: _split_at_full_index,
    Tensor.tensor_split: _split_at_full_index,
    torch.einsum: _einsum,
}
"""Handlers by function, called with the function and its arguments."""


def _torch_function(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    context = active_interceptor()
    if context is None or context.run_function is None:
        return run_torch_function(func, args, kwargs)
    return FUNCTIONS.get(func, context.run_function)(func, args, kwargs or {})


@cache
def _patch() -> Patches:
    return Patches(lambda: [(DTensor, "__torch_function__", classmethod(_torch_function))])


@contextmanager
def torch_functions() -> Iterator[None]:
    """Let contexts that intercept functions do so within the block."""
    _patch().acquire()
    try:
        yield
    finally:
        _patch().release()


def einsum_on_shards(equation: Any, *operands: Any) -> DTensor | None:
    """Compute an einsum on local shards; return None if it needs communication or DTensor should handle it."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    terms = _terms(equation, operands)
    if terms is None:
        return None
    plan = _plan(terms, operands)
    if plan is None:
        return None
    input_placements, gradients, output_placements = plan
    shards = [
        _ToLocal.apply(x.redistribute(placements=placements), grads)  # type: ignore[no-untyped-call]
        for x, placements, grads in zip(operands, input_placements, gradients, strict=True)
    ]
    sizes = {label: size for term, x in zip(terms[0], operands, strict=True) for label, size in zip(term, x.shape)}  # noqa: B905
    shape = torch.Size(sizes[label] for label in terms[1])
    stride = torch.empty(shape, device="meta").stride()
    result = torch.einsum(equation, *shards).contiguous()
    mesh = operands[0].device_mesh
    return DTensor.from_local(result, mesh, output_placements, run_check=False, shape=shape, stride=stride)


class _ToLocal(torch.autograd.Function):
    """Autograd function like `DTensor.to_local`, but with the same gradient strides on all ranks.

    PyTorch 2.11 derives the strides from the shard and gets different ones for a shard of one row. Autograd then copies
    the gradient on that rank only, which may communicate.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, gradient: list[Placement]) -> Tensor:
        ctx.mesh, ctx.gradient, ctx.shape, ctx.stride = x.device_mesh, gradient, x.shape, x.stride()
        local = local_of(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[DTensor, None]:
        (shard,) = gradients
        return DTensor.from_local(
            shard, ctx.mesh, ctx.gradient, run_check=False, shape=ctx.shape, stride=ctx.stride
        ), None


def _terms(equation: Any, operands: Sequence[Any]) -> EinsumTerms | None:
    """Parse the labels; return None unless all operands are DTensors on one mesh with a distinct label per dim."""
    if not isinstance(equation, str) or "." in equation:
        return None
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        result = "".join(label for label in sorted(set(inputs) - {","}) if inputs.count(label) == 1)
    is_supported = len(terms) == len(operands) and all(
        isinstance(x, DTensor) and len(set(term)) == len(term) == x.dim() and has_default_order(x)
        for term, x in zip(terms, operands, strict=False)
    )
    return (terms, result) if is_supported and len({x.device_mesh for x in operands}) == 1 else None


def _plan(
    terms: EinsumTerms, operands: Sequence[DTensor]
) -> tuple[list[list[Placement]], list[list[Placement]], list[Placement]] | None:
    """Plan the placements of operands, gradients and result; return None if an operand must be redistributed."""
    inputs: list[list[Placement]] = [[] for _ in operands]
    gradients: list[list[Placement]] = [[] for _ in operands]
    output: list[Placement] = []
    for axis in range(operands[0].device_mesh.ndim):
        current = [x.placements[axis] for x in operands]
        dims = [shard_dim(placement) for placement in current]
        sharded = [(term[dim], p) for term, dim, p in zip(terms[0], dims, current, strict=True) if dim is not None]
        if len({label for label, _ in sharded}) > 1 or any(p.is_partial() for p in current):
            return None
        for i, term in enumerate(terms[0]):
            is_sharded = bool(sharded) and sharded[0][0] in term
            placement = with_dim(sharded[0][1], term.index(sharded[0][0])) if is_sharded else Replicate()
            inputs[i].append(placement)
            gradients[i].append(placement if is_sharded or not sharded else Partial())
        if not sharded:
            output.append(Replicate())
        else:
            label, shard = sharded[0]
            output.append(with_dim(shard, terms[1].index(label)) if label in terms[1] else Partial())
    for x, placements in zip(operands, inputs, strict=True):
        is_replicated = all(placement == Replicate() for placement in x.placements)
        if not is_replicated and list(x.placements) != placements:
            return None
    return inputs, gradients, output
