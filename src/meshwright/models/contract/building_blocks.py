"""Operators of building blocks, from which families describe what their kinds compute: products, norms, attention,
feed-forward layers, experts, lookups and losses.

Kernels are those that PyTorch 2.13 runs eagerly on the CPU, in the forward and in the backward. On CUDA norms are one
kernel, and in compiled blocks chains of elementwise operators are; those are their fused kernels. Elements are counted
once for each kernel that reads or writes them. The gradient of a tensor that n operators read takes n - 1 sums
(`shared_input`). Doesn't import torch.
"""

from __future__ import annotations

from enum import StrEnum

from meshwright.models.contract.operators import Kernels, Operator, OperatorKind, Rerun
from meshwright.models.contract.saved import Saved


class Sharding(StrEnum):
    """How tensor parallelism shards the tensor of an operator: as `Saved` names it."""

    FULL = "full"
    STREAM = "stream"
    DIVIDED = "divided"

    def narrow(self, elements: float) -> Saved:
        """Return elements per token in the compute dtype."""
        return Saved(**{self.value: elements})

    def wide(self, elements: float) -> Saved:
        """Return elements per token in at least float32."""
        return Saved(**{f"wide_{self.value}": elements})


FULL, STREAM, DIVIDED = Sharding.FULL, Sharding.STREAM, Sharding.DIVIDED


def product(
    name: str, inner: int, columns: int, *, rows: float = 1.0, bias: Sharding | None = None, rerun: Rerun = Rerun.FULL,
    input_gradient: bool = True,
) -> Operator:  # fmt: skip
    """Return the product of a linear layer; `bias` is the sharding of a bias's gradient, of which a kernel sums rows.

    The backward of a block needs the results of all but its last product, which is not `rerun`.
    """
    summed = Kernels() if bias is None else Kernels(1, bias.narrow(rows * columns))
    return Operator(
        name, OperatorKind.PRODUCT, rows, inner, columns, backward=summed, rerun=rerun, input_gradient=input_gradient,
        fused_backward=None if bias is None else summed,
    )  # fmt: skip


def attention_core(name: str, *, flops: float, queries: int, keys: int, num_heads: int) -> Operator:
    """Return attention by a fused kernel, given its operations per token and the elements per token of the queries and
    of the keys, which are as many as those of the values."""
    lse = DIVIDED.wide(num_heads)
    forward = Kernels(moved=DIVIDED.narrow(2.0 * queries + 2.0 * keys) + lse)
    backward = Kernels(moved=DIVIDED.narrow(4.0 * queries + 4.0 * keys) + lse)
    return Operator(
        name, OperatorKind.ATTENTION, attention_flops=flops, forward=forward, backward=backward, rerun=Rerun.FULL,
        fused_forward=forward, fused_backward=backward, kept=DIVIDED.narrow(queries) + lse,
    )  # fmt: skip


def rms_norm(name: str, dim: int, sharding: Sharding = STREAM) -> Operator:
    """Return an RMS norm (Zhang and Sennrich 2019), computed in at least float32."""
    cast = sharding.narrow(2.0 * dim)
    return Operator(
        name,
        OperatorKind.MEMORY,
        forward=Kernels(6, sharding.wide(7.0 * dim + 6), casts=2, cast=cast),
        backward=Kernels(14, sharding.wide(23.0 * dim + 10), casts=3, cast=cast),
        # The gradient of the input, then that of the weight.
        fused_forward=Kernels(1, sharding.narrow(2.0 * dim)),
        fused_backward=Kernels(2, sharding.narrow(5.0 * dim)),
        fused_on_cuda=True,
    )


def layer_norm(name: str, dim: int, sharding: Sharding = STREAM) -> Operator:
    """Return a layer norm with weight and bias (Ba et al. 2016)."""
    forward = Kernels(1, sharding.narrow(2.0 * dim) + sharding.wide(2))
    backward = Kernels(1, sharding.narrow(3.0 * dim) + sharding.wide(2))
    return Operator(
        name, OperatorKind.MEMORY, forward=forward, backward=backward, fused_forward=forward,
        # The gradient of the input, then those of weight and bias.
        fused_backward=Kernels(2, sharding.narrow(5.0 * dim)),
    )  # fmt: skip


def rotary_embedding(name: str, *sizes: int) -> Operator:
    """Return the rotation of queries and keys of these elements per token (Su et al. 2021)."""
    number, size = len(sizes), float(sum(sizes))
    return Operator(
        name,
        OperatorKind.MEMORY,
        # Products with the tables, their sums, and the halves put together.
        forward=Kernels(
            7 * number, DIVIDED.narrow(2 * size) + DIVIDED.wide(7 * size), casts=number, cast=DIVIDED.narrow(size)
        ),
        backward=Kernels(
            8 * number, DIVIDED.narrow(5 * size) + DIVIDED.wide(5 * size), casts=5 * number,
            cast=DIVIDED.narrow(3 * size),
        ),
        fused_forward=Kernels(number, DIVIDED.narrow(2 * size)),
        fused_backward=Kernels(number, DIVIDED.narrow(2 * size)),
    )  # fmt: skip


def swiglu(name: str, size: float, sharding: Sharding = DIVIDED) -> Operator:
    """Return the gate silu(x) · y of a feed-forward layer of `size` columns per token (Shazeer 2020)."""
    return Operator(
        name,
        OperatorKind.MEMORY,
        forward=Kernels(2, sharding.narrow(5.0 * size)),
        backward=Kernels(3, sharding.narrow(9.0 * size)),
        fused_forward=Kernels(1, sharding.narrow(3.0 * size)),
        fused_backward=Kernels(1, sharding.narrow(6.0 * size)),
    )


def residual_sum(name: str, dim: int, *, rerun: Rerun = Rerun.ALWAYS) -> Operator:
    """Return the sum of a branch and the stream, whose gradient is the sum of both paths'. Dropout is a part of its
    kernel, and one of its own in the backward."""
    return Operator(
        name,
        OperatorKind.MEMORY,
        forward=Kernels(1, STREAM.narrow(3.0 * dim)),
        backward=Kernels(1, STREAM.narrow(3.0 * dim)),
        # A part of the kernel of the norm that follows, which reads the branch and writes the sum.
        fused_forward=Kernels(0, STREAM.narrow(2.0 * dim)),
        fused_backward=Kernels(0, STREAM.narrow(float(dim))),
        rerun=rerun,
        dropped=Kernels(1, STREAM.narrow(2.0 * dim)),
    )


def shared_input(name: str, dim: float, readers: int, sharding: Sharding = FULL) -> Operator:
    """Return the sums of the gradients of a tensor that several operators read."""
    sums = readers - 1
    return Operator(
        name,
        OperatorKind.MEMORY,
        backward=Kernels(sums, sharding.narrow(3.0 * dim * sums)),
        fused_backward=Kernels(0, sharding.narrow(dim * sums)),
    )


def embedding(name: str, num_rows: int, dim: int, *, tokens: float = 1.0) -> Operator:
    """Return the lookup of `tokens` rows per token in a table, whose gradient is as large as the table."""
    return Operator(
        name,
        OperatorKind.MEMORY,
        forward=Kernels(1, FULL.narrow(2.0 * dim * tokens) + Saved(fixed_bytes=8.0 * tokens)),
        backward=Kernels(
            1, FULL.narrow(dim * tokens) + Saved(fixed_bytes=8.0 * tokens), moved_once=DIVIDED.narrow(num_rows * dim)
        ),
        input_gradient=False,
    )


LOSS = "loss"
"""Name of the loss, which features may compute otherwise."""


def cross_entropy(vocab_size: int, sharding: Sharding = DIVIDED) -> Operator:
    """Return the cross-entropy of logits, computed in at least float32."""
    return Operator(
        LOSS,
        OperatorKind.MEMORY,
        forward=Kernels(2, sharding.wide(2.0 * vocab_size), casts=1, cast=sharding.narrow(vocab_size)),
        backward=Kernels(2, sharding.wide(4.0 * vocab_size), casts=1, cast=sharding.narrow(vocab_size)),
        input_gradient=True,
    )


def activation(name: str, size: float, sharding: Sharding = DIVIDED) -> Operator:
    """Return an activation function of one input, such as GELU or SiLU."""
    forward, backward = Kernels(1, sharding.narrow(2.0 * size)), Kernels(1, sharding.narrow(3.0 * size))
    return Operator(
        name, OperatorKind.MEMORY, forward=forward, backward=backward, fused_forward=forward, fused_backward=backward
    )


def masks_and_positions(name: str, num_masks: int, *, windows: int = 0, rotary: bool) -> Operator:
    """Return what makes the masks, of which some have windows, and rotary tables of a micro-batch, once for all layers
    of a stage."""
    launches = 17 * rotary + 18 * num_masks + 9 * windows
    return Operator(name, OperatorKind.MEMORY, forward=Kernels(launches), input_gradient=False)


def grouped_product(name: str, inner: int, columns: int, *, rows: float, rerun: Rerun = Rerun.FULL) -> Operator:
    """Return the product of `rows` per token with the matrices of the experts that they were sent to."""
    return Operator(name, OperatorKind.GROUPED, rows, inner, columns, rerun=rerun)
