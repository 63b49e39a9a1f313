"""Operators of a diffusion transformer: its modulated blocks, embedders and ends. Doesn't import torch.

Counts are per token, so what is computed once per sample has one part in `tokens` of a row.
"""

from __future__ import annotations

from meshwright.models.contract.building_blocks import (
    DIVIDED,
    FULL,
    activation,
    attention_core,
    embedding,
    product,
    residual_sum,
    shared_input,
)
from meshwright.models.contract.operators import Kernels, Operator, OperatorKind, Rerun


def block_operators(
    dim: int, inner: int, ffn: int, *, num_heads: int, tokens: int, flops: float
) -> tuple[Operator, ...]:
    """Return the operators of a block, given its widths and the operations of attention per token."""
    return (
        *modulation("modulation", dim, 6, tokens, summed=True),
        modulated_norm("attention_norm", dim, tokens),
        shared_input("attention", dim, 3),
        product("attention.wq", dim, inner, bias=DIVIDED),
        product("attention.wk", dim, inner),
        product("attention.wv", dim, inner, bias=DIVIDED),
        attention_core("attention", flops=flops, queries=inner, keys=inner, num_heads=num_heads),
        product("attention.wo", inner, dim, bias=FULL),
        gate("attention_gate", dim, tokens),
        residual_sum("attention_add", dim),
        modulated_norm("mlp_norm", dim, tokens),
        product("mlp.fc1", dim, ffn, bias=DIVIDED),
        activation("mlp", ffn),
        product("mlp.fc2", ffn, dim, bias=FULL),
        gate("mlp_gate", dim, tokens, rerun=Rerun.NEVER),
        residual_sum("mlp_add", dim, rerun=Rerun.NEVER),
    )


def final_operators(dim: int, patch_dim: int, tokens: int) -> tuple[Operator, ...]:
    """Return the operators of the final layer and the loss."""
    return (
        *modulation("final.modulation", dim, 2, tokens, summed=False),
        modulated_norm("final", dim, tokens),
        product("final.head", dim, patch_dim, bias=FULL),
        reordered("unpatchify", patch_dim),
        squared_error("loss", patch_dim),
    )


def patch_operators(dim: int, patch_dim: int, *, num_axes: int) -> tuple[Operator, ...]:
    """Return the operators of the patch embedding, with positions along a number of axes, and of attention's mask."""
    return (
        reordered("patchify", patch_dim, input_gradient=False),
        product("embed", patch_dim, dim, bias=FULL, input_gradient=False),
        sinusoids("positions", 1.1 * num_axes),
        Operator(
            "positions",
            OperatorKind.MEMORY,
            forward=Kernels(2, FULL.narrow(3.0 * dim)),  # put together, and added
            input_gradient=False,
        ),
    )


def embedder_operators(name: str, features: int, dim: int, tokens: int) -> tuple[Operator, ...]:
    """Return the operators of the embedder of a number, added to the other conditions."""
    size = dim / tokens
    return (
        sinusoids(name, 1),
        product(f"{name}.fc1", features, dim, rows=1 / tokens, bias=FULL, input_gradient=False),
        activation(name, size, FULL),
        product(f"{name}.fc2", dim, dim, rows=1 / tokens, bias=FULL),
    )


def label_operators(num_rows: int, dim: int, tokens: int, *, sums: int) -> tuple[Operator, ...]:
    """Return the operators of the label's embedding, and the sums of all conditions."""
    summed = Kernels(sums, FULL.narrow(3.0 * sums * dim / tokens))
    return (
        embedding("label_embed", num_rows, dim, tokens=1 / tokens),
        Operator("condition", OperatorKind.MEMORY, forward=summed, input_gradient=False),
    )


def modulation(name: str, dim: int, parts: int, tokens: int, *, summed: bool) -> tuple[Operator, ...]:
    """Return the operators that turn a sample's condition into vectors; `summed` if the condition's gradient is added
    to that of a later reader."""
    size = dim / tokens
    # The gradients of the vectors are put together.
    gradients = Kernels(1 + summed, FULL.narrow((2 * parts + 3 * summed) * size))
    return (
        activation(name, size, FULL),
        product(name, dim, parts * dim, rows=1 / tokens, bias=FULL),
        Operator(name, OperatorKind.MEMORY, backward=gradients, fused_backward=gradients),
    )


def modulated_norm(name: str, dim: int, tokens: int) -> Operator:
    """Return a layer norm without parameters that a scale and a shift per sample follow."""
    each = dim / tokens
    return Operator(
        name,
        OperatorKind.MEMORY,
        forward=Kernels(4, FULL.narrow(6.0 * dim + 2 + 4 * each)),
        backward=Kernels(5, FULL.narrow(10.0 * dim + 2 + 3 * each)),
        fused_forward=Kernels(1, FULL.narrow(2.0 * dim)),
        # The gradient of the input, then those of shift and scale.
        fused_backward=Kernels(2, FULL.narrow(5.0 * dim)),
    )


def gate(name: str, dim: int, tokens: int, *, rerun: Rerun = Rerun.ALWAYS) -> Operator:
    """Return the product of a branch with a vector per sample."""
    each = dim / tokens
    return Operator(
        name,
        OperatorKind.MEMORY,
        forward=Kernels(1, FULL.narrow(2.0 * dim + each)),
        backward=Kernels(3, FULL.narrow(6.0 * dim + 2 * each)),
        fused_forward=Kernels(0, FULL.narrow(float(dim))),  # a part of the kernel of the sum that follows
        fused_backward=Kernels(1, FULL.narrow(3.0 * dim)),
        rerun=rerun,
    )


def sinusoids(name: str, tables: float) -> Operator:
    """Return tables of sines and cosines, of few elements."""
    return Operator(name, OperatorKind.MEMORY, forward=Kernels(10 * tables), input_gradient=False)


def reordered(name: str, size: float, *, input_gradient: bool = True) -> Operator:
    """Return a copy of patches in the order of pixels, or the other way round."""
    copied = Kernels(1, FULL.narrow(2.0 * size))
    return Operator(name, OperatorKind.MEMORY, forward=copied, backward=copied, input_gradient=input_gradient)


def squared_error(name: str, size: float) -> Operator:
    """Return the sum of squared errors of the output, in at least float32."""
    return Operator(
        name,
        OperatorKind.MEMORY,
        forward=Kernels(3, FULL.wide(6.0 * size), casts=1, cast=FULL.narrow(size)),
        backward=Kernels(3, FULL.wide(7.0 * size), casts=1, cast=FULL.narrow(size)),
    )
