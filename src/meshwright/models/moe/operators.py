"""Operators of a layer of experts: router, dispatch on a rank that holds all experts, experts, and the sum of their
outputs. They run eagerly in compiled blocks, too. Doesn't import torch.

Indices are int64. A capacity has `copies` slots per token, of all experts; without one, each token has `top_k` rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.models.contract.building_blocks import DIVIDED, FULL, grouped_product, product, shared_input, swiglu
from meshwright.models.contract.operators import Kernels, Operator, OperatorKind, Rerun
from meshwright.models.contract.saved import Saved
from meshwright.nn.experts.router_config import RouterConfig, Score


def experts_operators(
    name: str, dim: int, hidden: int, router: RouterConfig, *, copies: float, shared: int
) -> tuple[Operator, ...]:
    """Return the operators of a layer at the end of a block.

    Args:
        name: path of the layer.
        dim: width of a row.
        hidden: columns of an expert.
        router: settings of the router.
        copies: rows per token.
        shared: columns of the shared experts; 0 for none.
    """
    found = (
        shared_input(name, dim, 4 if shared else 2),
        *_router(f"{name}.router", dim, router),
        _dispatch(name, dim, router, copies),
        grouped_product(f"{name}.experts.gate", dim, hidden, rows=copies),
        grouped_product(f"{name}.experts.up", dim, hidden, rows=copies),
        _hidden_layer(f"{name}.experts", dim, hidden, copies),
        grouped_product(f"{name}.experts.down", hidden, dim, rows=copies),
        _combine(name, dim, copies, rerun=Rerun.ALWAYS if shared else Rerun.NEVER),
        *(_shared(f"{name}.shared", dim, shared) if shared else ()),
    )
    return tuple(replace(one, fused_forward=one.forward, fused_backward=one.backward) for one in found)


def _router(name: str, dim: int, router: RouterConfig) -> Iterator[Operator]:
    experts, chosen = float(router.num_experts), float(router.top_k)
    balances, sigmoid = bool(router.balance_loss), router.score is Score.SIGMOID
    yield Operator(
        f"{name}.gate",
        OperatorKind.PRODUCT,
        inner=dim,
        columns=router.num_experts,
        # Casts of tokens and weight, and back.
        forward=Kernels(casts=2, cast=FULL.narrow(dim)),
        backward=Kernels(casts=4, cast=FULL.narrow(2.0 * dim)),
        rerun=Rerun.FULL,
        wide=True,
    )
    # Chosen experts, whether they have slots, and counts of them; a recomputed forward takes those of the first.
    groups, slots = 8 * (router.num_groups > 1), 14 * (router.capacity_factor is not None)
    yield Operator(
        f"{name}.chosen",
        OperatorKind.MEMORY,
        forward=Kernels(
            9 + (router.bias_rate > 0) + groups + slots, FULL.wide(experts + chosen) + Saved(fixed_bytes=41.0 * chosen)
        ),
        rerun=Rerun.NEVER,
        input_gradient=False,
    )
    normalizes, z = int(router.normalize), int(router.z_loss > 0)
    # Scores and weights of the chosen experts, and sums over tokens for the losses.
    yield Operator(
        name,
        OperatorKind.MEMORY,
        forward=Kernels(
            6 + 3 * normalizes + 7 * balances + 3 * sigmoid + 6 * z,
            FULL.wide((2 + balances + 3 * sigmoid + z) * experts + (6 + 4 * normalizes) * chosen)
            + Saved(fixed_bytes=26.0 * chosen),
        ),
        backward=Kernels(
            5 + 10 * normalizes + 4 * balances + 10 * sigmoid * balances + 8 * z,
            FULL.wide((6 + 2 * balances + 14 * sigmoid * balances + 5 * z) * experts + (5 + 13 * normalizes) * chosen)
            + Saved(fixed_bytes=9.0 * chosen),
        ),
    )


def _dispatch(name: str, dim: int, router: RouterConfig, copies: float) -> Operator:
    """Return the order of rows by expert, the rows and their weights."""
    padded = router.capacity_factor is not None
    indices, chosen = Saved(fixed_bytes=(62.0 + 90 * padded) * router.top_k), router.top_k
    return Operator(
        f"{name}.dispatch",
        OperatorKind.MEMORY,
        forward=Kernels(
            8 + 17 * padded, FULL.narrow(2.0 * (copies + padded) * dim) + FULL.wide(2.0 * copies) + indices
        ),
        backward=Kernels(
            7 + 7 * padded,
            FULL.narrow((copies + 1.0 + 2 * padded) * dim) + FULL.wide(4.0 * copies)
            + Saved(fixed_bytes=56.0 * copies + 40 * chosen),
        ),
    )  # fmt: skip


def _hidden_layer(name: str, dim: int, hidden: int, copies: float) -> Operator:
    """Return weight · silu(x) · y of the experts, whose weights are in at least float32, and the sum of both gradients
    of a row."""
    size = copies * hidden
    return Operator(
        name,
        OperatorKind.MEMORY,
        forward=Kernels(3, DIVIDED.narrow(6.0 * size) + DIVIDED.wide(size), casts=1, cast=DIVIDED.narrow(size)),
        backward=Kernels(
            7,
            DIVIDED.narrow(10.0 * size) + DIVIDED.wide(5.0 * size) + FULL.narrow(3.0 * copies * dim),
            casts=2,
            cast=DIVIDED.narrow(2.0 * size),
        ),
    )


def _combine(name: str, dim: int, copies: float, *, rerun: Rerun) -> Operator:
    """Return the sum of each token's rows."""
    return Operator(
        f"{name}.combine",
        OperatorKind.MEMORY,
        forward=Kernels(5, FULL.narrow((copies + 1.0) * dim) + Saved(fixed_bytes=40.0 * copies + 64)),
        backward=Kernels(1, FULL.narrow(2.0 * copies * dim) + Saved(fixed_bytes=8.0 * copies)),
        rerun=rerun,
    )


def _shared(name: str, dim: int, hidden: int) -> Iterator[Operator]:
    yield product(f"{name}.gate", dim, hidden)
    yield product(f"{name}.up", dim, hidden)
    yield swiglu(name, hidden)
    yield product(f"{name}.down", hidden, dim, rerun=Rerun.NEVER)
    yield Operator(name, OperatorKind.MEMORY, forward=Kernels(1, FULL.narrow(3.0 * dim)), rerun=Rerun.NEVER)
