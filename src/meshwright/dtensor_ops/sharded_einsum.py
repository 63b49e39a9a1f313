"""Einsum on pieces, for `replicate_fallback`: a letter that is cut alike wherever it stands needs no message.

PyTorch makes an einsum matrix products of flattened dims, and DTensor cannot flatten a dim that is cut unevenly, or
flattens it only where whole. By letters there is no such question: if one letter's dim is cut, each rank has its
part of the result, cut there too; if that letter is summed over, each rank has a part of each sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from meshwright.dtensor_ops.private import cut_dim, cut_in_order, moved_to
from meshwright.reshard.dtensor import local_of

Terms = tuple[list[str], str]
"""The letters of each operand, and of the result."""


def einsum_on_pieces(equation: Any, *operands: Any) -> DTensor | None:
    """The result, without a message; None where it takes one, or where DTensor has to look."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    terms = _terms(equation, operands)
    if terms is None:
        return None
    plan = _plan(terms, operands)
    if plan is None:
        return None
    wanted, gradients, of_result = plan
    pieces = [
        _Piece.apply(x.redistribute(placements=placements), grads)  # type: ignore[no-untyped-call]
        for x, placements, grads in zip(operands, wanted, gradients, strict=True)
    ]
    sizes = {letter: size for term, x in zip(terms[0], operands, strict=True) for letter, size in zip(term, x.shape)}  # noqa: B905
    shape = torch.Size(sizes[letter] for letter in terms[1])
    stride = torch.empty(shape, device="meta").stride()
    result = torch.einsum(equation, *pieces).contiguous()
    return DTensor.from_local(result, operands[0].device_mesh, of_result, run_check=False, shape=shape, stride=stride)


class _Piece(torch.autograd.Function):
    """`DTensor.to_local`, with a gradient of the same strides on all ranks.

    PyTorch's (2.11) derives them from the piece, and says something else where that has one row: autograd then copies
    the gradient on that rank alone, which may take a message.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, gradient: list[Placement]) -> Tensor:
        ctx.mesh, ctx.gradient, ctx.shape, ctx.stride = x.device_mesh, gradient, x.shape, x.stride()
        local = local_of(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[DTensor, None]:
        (piece,) = gradients
        return DTensor.from_local(
            piece, ctx.mesh, ctx.gradient, run_check=False, shape=ctx.shape, stride=ctx.stride
        ), None


def _terms(equation: Any, operands: Sequence[Any]) -> Terms | None:
    """The letters, if every operand is a DTensor of one mesh with a letter of its own for each dim."""
    if not isinstance(equation, str) or "." in equation:
        return None
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        result = "".join(letter for letter in sorted(set(inputs) - {","}) if inputs.count(letter) == 1)
    fits = len(terms) == len(operands) and all(
        isinstance(x, DTensor) and len(set(term)) == len(term) == x.dim() and cut_in_order(x)
        for term, x in zip(terms, operands, strict=False)
    )
    return (terms, result) if fits and len({x.device_mesh for x in operands}) == 1 else None


def _plan(
    terms: Terms, operands: Sequence[DTensor]
) -> tuple[list[list[Placement]], list[list[Placement]], list[Placement]] | None:
    """How operands must lie, their gradients, and the result; None where an operand would have to move."""
    wanted: list[list[Placement]] = [[] for _ in operands]
    gradients: list[list[Placement]] = [[] for _ in operands]
    of_result: list[Placement] = []
    for axis in range(operands[0].device_mesh.ndim):
        now = [x.placements[axis] for x in operands]
        dims = [cut_dim(placement) for placement in now]
        cuts = [(term[dim], p) for term, dim, p in zip(terms[0], dims, now, strict=True) if dim is not None]
        if len({letter for letter, _ in cuts}) > 1 or any(p.is_partial() for p in now):
            return None
        for place, term in enumerate(terms[0]):
            is_cut = bool(cuts) and cuts[0][0] in term
            placement = moved_to(cuts[0][1], term.index(cuts[0][0])) if is_cut else Replicate()
            wanted[place].append(placement)
            gradients[place].append(placement if is_cut or not cuts else Partial())
        if not cuts:
            of_result.append(Replicate())
        else:
            letter, cut = cuts[0]
            of_result.append(moved_to(cut, terms[1].index(letter)) if letter in terms[1] else Partial())
    for x, placements in zip(operands, wanted, strict=True):
        is_whole = all(placement == Replicate() for placement in x.placements)
        if not is_whole and list(x.placements) != placements:
            return None
    return wanted, gradients, of_result
