"""Classes of what a device does in a step, told by the names of its kernels, and each one's share of the step.

Pure: names and times of a profile in, numbers out. Torch-free. Names are those that PyTorch's profiler shows on Hopper
GPUs (cuBLAS, CUTLASS, cuDNN, FlashAttention, Triton, ATen), and ATen's operators, which are all that it shows on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class KernelClass(StrEnum):
    """Class of kernels, by what they compute or move."""

    ATTENTION = "attention"
    PRODUCTS = "products"
    """Matrix products, of float8 too."""
    OPTIMIZER = "optimizer"
    """Updates, and the norm and clipping of gradients."""
    COMMUNICATION = "communication"
    COPIES = "copies"
    """Copies, casts and fills: of weights to the compute dtype, of gathered blocks, between host and device."""
    ELEMENTWISE = "elementwise"
    """Elementwise operations and reductions, fused or not: norms, activations, casts to float8, loss, embedding."""
    OTHER = "other"
    IDLE = "idle"
    """Nothing runs on the device."""


def _pattern(*parts: str) -> re.Pattern[str]:
    return re.compile("|".join(parts), re.IGNORECASE)


RULES = (
    (KernelClass.COMMUNICATION, _pattern(r"\bnccl", r"^gloo:", r"^c10d::", r"^_?c10d_functional")),
    # First what Inductor fused: its names have all that was fused, and attention and products that it was fused for.
    (KernelClass.COPIES, _pattern(r"^triton_poi_fused_((_to_copy|clone|copy|cat|t|transpose|view)_)+\d+$")),
    (KernelClass.ELEMENTWISE, _pattern(r"^triton_(poi|red|per|for)_", "cpp_fused")),
    # Before products: FlashAttention 3 is made of CUTLASS, flex attention of Triton's templates.
    (KernelClass.ATTENTION, _pattern("flash", "fmha", "sdpa", "scaled_dot_product", r"attention", r"\bflex_")),
    (
        KernelClass.PRODUCTS,
        _pattern(
            "nvjet", "gemm", "gemv", "cutlass", "cublas", "xmma", r"splitk_?reduce", r"triton_(tem|mm|bmm)",
            "grouped_mm", r"^mkldnn", r"^mkl::",
            r"^aten::(mm|bmm|addmm|addmv|baddbmm|dot|_scaled_mm|matmul|linear|mkldnn_\w+)$",
        ),
    ),
    # Before copies and elementwise: lists of tensors are those of the optimizer, unless they are copied.
    (KernelClass.COPIES, _pattern(r"multi_tensor_apply.*copy", r"aten::_foreach_copy")),
    (KernelClass.OPTIMIZER, _pattern("multi_tensor_apply", "adam", "lpnorm", r"aten::_(foreach|fused)_", "optimizer")),
    (
        KernelClass.COPIES,
        _pattern(
            r"\bmemcpy", r"\bmemset", r"copy_kernel", "copy_device_to_device", "BatchedCopy", "split_with_sizes_copy",
            "chunk_cat", "FillFunctor", r"^aten::(copy_|cat|fill_|zero_|clone|split_with_sizes_copy|_chunk_cat)",
        ),
    ),
    (
        KernelClass.ELEMENTWISE,
        _pattern(
            r"\btriton_", "elementwise", "reduce_kernel", "softmax", "layer_?norm", "rms_?norm",
            "nll_loss", "cross_entropy", "swiglu", "silu", "gelu", "rope", "rotary", "embedding", "index", "gather",
            "scatter", "dropout",
            r"^aten::(add|mul|sub|div|neg|exp|log|pow|sqrt|rsqrt|sum|mean|amax|max|where|sigmoid|cos|sin|normal|rand"
            r"|uniform|eq|ne|ge|gt|le|lt|abs|maximum|minimum|clamp|sgn|bitwise|logical|isfinite|all|any|arange|cumsum)",
        ),
    ),
)  # fmt: skip
"""The first rule that a name matches says its class."""


@dataclass(frozen=True)
class Busy:
    """A kernel, or another thing that keeps the device busy, in a profile."""

    name: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        """Time at which it ends."""
        return self.start_us + self.duration_us


def classify(name: str) -> KernelClass:
    """Return the class of a kernel or operator by its name."""
    return next((kind for kind, pattern in RULES if pattern.search(name)), KernelClass.OTHER)


def own_times(busy: Iterable[Busy]) -> Iterator[Busy]:
    """Yield the pieces of nested operators of one thread in which no inner one runs, each under its own name."""
    open_ones: list[Busy] = []
    now = 0.0
    for one in [*sorted(busy, key=lambda one: (one.start_us, -one.duration_us)), Busy("", float("inf"), 0.0)]:
        while open_ones and open_ones[-1].end_us <= one.start_us:
            inner = open_ones.pop()
            yield Busy(inner.name, now, inner.end_us - now)
            now = inner.end_us
        if open_ones:
            yield Busy(open_ones[-1].name, now, one.start_us - now)
        open_ones.append(one)
        now = one.start_us


def times_by_class(busy: Iterable[Busy], *, start_us: float, end_us: float) -> dict[KernelClass, float]:
    """Return how long the device spent on each class between two times, in microseconds; they sum to what lies between.

    Where kernels overlap, the time is that of the one that started first, so that no time counts twice; idle is the
    time in which none runs.
    """
    spent = dict.fromkeys(KernelClass, 0.0)
    covered = start_us
    for one in sorted(busy, key=lambda one: one.start_us):
        end = min(one.end_us, end_us)
        spent[classify(one.name)] += max(0.0, end - max(one.start_us, covered))
        covered = max(covered, end)
    spent[KernelClass.IDLE] = (end_us - start_us) - sum(spent.values())
    return spent


def below_peak(shares: Mapping[KernelClass, float], mfu: float) -> dict[str, float]:
    """Return what stands between an MFU and 1, in shares of the step, which sum to 1 − `mfu`; the largest first.

    Products and attention do the FLOPs of the MFU: at the peak rate they would take that share of the step. What they
    take beyond it is the rate that they miss; all other classes do none of these FLOPs.

    Args:
        shares: share of the step by class, summing to 1.
        mfu: FLOPs of the step over its time and the peak rate.
    """
    useful = (KernelClass.PRODUCTS, KernelClass.ATTENTION)
    lost = {str(kind): share for kind, share in shares.items() if kind not in useful}
    lost["products and attention below the peak rate"] = sum(shares[kind] for kind in useful) - mfu
    return dict(sorted(lost.items(), key=lambda item: -item[1]))
