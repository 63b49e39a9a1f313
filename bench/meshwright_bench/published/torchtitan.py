"""Turn blocks of a plan into torchtitan's, which differ in torchao's casts to float8 and in tensor parallelism's
collectives.

Scaled by tensor, tensor-parallel ranks cast what they gather, and agree on the scale before (torchao,
`float8_tensor_parallel.py`); FSDP casts weights before it gathers them. Scaled by row, gathers are of 16 bits, ranks
cast all that they have gathered, and the backward casts its operands again along their other dim (`float8_linear.py`).
Doesn't import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.models.contract.operators import OperatorKind
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.run_plan import Collective, LayerSpec, Mesh, PlannedOperator
from meshwright.plan.traffic import Purpose
from meshwright_bench.published.programs import Program

ROW_PARALLEL = ("attention.wo", "ffn.down")
NUM_SCALES = 4 + 7, 7
"""Scales of a block's forward, of inputs and weights, and of its backward, of gradients."""


def as_torchtitan(kind: LayerSpec, program: Program, mesh: Mesh) -> LayerSpec:
    """Return a block as torchtitan runs it; ends stay as they are."""
    if not kind.is_block:
        return kind
    products = {one.name: one for one in kind.operators if one.rows}
    tp = mesh.size(*mesh.view("tp"))
    operators = tuple(
        _casts(one, products[one.name], program, tp) if _is_cast(one, products) else one for one in kind.operators
    )
    in_float8 = any(one.rate == "float8" for one in kind.operators)
    sent = tuple(_sent(kind, program, mesh, in_float8=in_float8 and program.by_tensor))
    return replace(kind, operators=operators, collectives=sent)


def _is_cast(one: PlannedOperator, products: dict[str, PlannedOperator]) -> bool:
    """Return whether an operator is what casts a product's operands."""
    return one.kind is OperatorKind.MEMORY and one.name in products and products[one.name].rate == "float8"


def _casts(one: PlannedOperator, product: PlannedOperator, program: Program, tp: int) -> PlannedOperator:
    """Return the casts of a product's operands, of which some are of shards and then copied by columns, once they are
    gathered: inputs of column-parallel layers, and gradients of results of row-parallel ones."""
    ahead, back = one.fused_forward, one.fused_backward
    assert ahead is not None and back is not None  # casts in compiled blocks are kernels of their own
    inputs = product.rows * product.inner * (ahead.num_bytes > 0)  # layers share the cast of their input
    outputs = product.rows * product.columns
    if not program.by_tensor:
        back = replace(back, num_bytes=back.num_bytes + 5 * inputs + 4 * outputs)
    elif tp == 1:  # with tensor parallelism, weights are too small to matter
        ahead, back = replace(ahead, bytes_once=0), replace(back, bytes_once=2 * product.inner * product.columns)
    elif product.name in ROW_PARALLEL:
        back = replace(back, num_bytes=(back.num_bytes - outputs) // tp + 2 * outputs)
    else:
        ahead = replace(ahead, num_bytes=ahead.num_bytes // tp)
        back = replace(back, num_bytes=back.num_bytes + 2 * inputs)
    return replace(one, fused_forward=ahead, fused_backward=back)


def _sent(kind: LayerSpec, program: Program, mesh: Mesh, *, in_float8: bool) -> Iterator[Collective]:
    """Yield the collectives of a block: those whose results selective recomputation doesn't keep again in the backward,
    and, if gathers are in float8, a sum for each scale."""
    again = kind.recompute is RecomputePolicy.SELECTIVE
    for one in kind.collectives:
        if again and one.op in program.resends:
            one = replace(one, backward=one.backward + one.recomputed)
        yield replace(one, elements=one.elements // 2) if in_float8 and one.op == "all_gather" else one
    if in_float8 and (axes := mesh.view("tp")):
        ahead, back = NUM_SCALES
        back += ahead if again else 0
        yield Collective(
            Purpose.TENSOR, "all_reduce", axes, 1, "float32", forward=ahead, backward=back, recomputed=ahead
        )
