"""Costs of real modules on the CPU, measured three ways, against what descriptions say.

Counting rules:

- FLOPs are those of PyTorch's `FlopCounterMode`, with its own formulas of fused attention and products also for the
  CPU's kernels; of pairs of queries and keys, causal attention has those on and below the diagonal.
- A kernel is an operator in a profile that computes: no view, no allocation, and nothing composite, whose parts count
  instead. What an operator calls inside of it is a part of it.
- An operator moves the bytes of its tensors, read and written. Of an expanded tensor each element counts once, and a
  lookup reads what it returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from meshwright.nn.kept_results import RecallingMode

aten = torch.ops.aten


@dataclass(frozen=True)
class Measured:
    """Costs of a forward or a backward."""

    flops: int
    num_bytes: int
    kernels: Counter[str]

    @property
    def launches(self) -> int:
        return self.kernels.total()


Pass = Callable[[], Any]
Passes = Callable[[], tuple[Pass, Pass]]
"""Function that returns a forward and its backward, which each way of measuring runs anew."""


def measure(make: Passes) -> tuple[Measured, Measured]:
    """Costs of a forward and its backward."""
    found = [[one(run) for run in make()] for one in (count_flops, _moved, _kernels)]
    return Measured(*(one[0] for one in found)), Measured(*(one[1] for one in found))


def _visible(flops: int, query: Any, key: Any, is_causal: bool) -> int:
    """Operations of attention for the pairs that a causal kernel computes, given those of all pairs."""
    queries, keys = query[-2], key[-2]
    return flops * (queries + 1) // (2 * queries) if is_causal and queries == keys else flops


def _attention(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, **named: Any) -> int:
    return _visible(sdpa_flop_count(q, k, v), q, k, is_causal)


def _attention_backward(
    gradient: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dropout_p: float, is_causal: bool, **named: Any
) -> int:
    return _visible(sdpa_backward_flop_count(gradient, q, k, v), q, k, is_causal)


COUNTED_TOO = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    # Rows, or columns, are divided among groups, of which either the second operand or the result has a matrix each.
    aten.addmm_: lambda total, a, b, **named: 2 * a[0] * a[1] * b[1],
    aten._grouped_mm: lambda a, b, *_, **named: 2 * a[-2] * a[-1] * b[-1],
}
"""Formulas by the shapes of operands, of kernels that `FlopCounterMode` doesn't know by itself."""


def count_flops(run: Pass) -> int:
    """Operations of products and attention."""
    with FlopCounterMode(display=False, custom_mapping=COUNTED_TOO) as counter:
        run()
    return counter.get_total_flops()


def count_local_flops(run: Pass) -> int:
    """Operations of this rank, of whose DTensors `FlopCounterMode` would count all ranks' parts."""
    with _LocalFlops() as counter:
        run()
    return counter.flops


class _LocalFlops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops, self._formulas = 0, FlopCounterMode(display=False, custom_mapping=COUNTED_TOO).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, own = kwargs or {}, [one for one in types if one.__torch_dispatch__ is not Tensor.__torch_dispatch__]
        if any(hasattr(one, "__tensor_flatten__") for one in own):
            return NotImplemented  # until it runs operators on plain tensors
        out = func(*args, **kwargs)
        if not own and func._overloadpacket in self._formulas:  # others are fake, to propagate shardings
            self.flops += self._formulas[func._overloadpacket](*args, **kwargs, out_val=out)
        return out


ALLOCATIONS = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "set_data", "item",
    "_local_scalar_dense", "is_nonzero", "result_type", "promote_types", "_unsafe_view", "_reshape_alias", "lift_fresh",
    "detach_",
}  # fmt: skip
LOOKUPS = {
    "embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss_backward", "_embedding_bag",
    "_embedding_bag_forward_only", "embedding_dense_backward", "scatter_add", "scatter",
}  # fmt: skip


@cache
def _computes(name: str) -> bool | None:
    """Whether an operator is a kernel; None if it consists of others."""
    namespace, _, base = name.partition("::")
    if namespace not in ("aten", "meshwright"):
        return None
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None or base in ALLOCATIONS:
        return None if packet is None else False
    found = [getattr(packet, one) for one in packet.overloads()]
    found = [one for one in found if torch._C._dispatch_has_kernel(one.name()) and "out" not in one._overloadname]
    composite = "CompositeImplicitAutograd"
    if all(torch._C._dispatch_has_kernel_for_dispatch_key(one.name(), composite) for one in found):
        return None
    returned = [result.alias_info for one in found for result in one._schema.returns]
    return not any(alias is not None and not alias.is_write for alias in returned)


@contextmanager
def _counting_recalled() -> Iterator[Counter[str]]:
    """Count the operators whose results selective recomputation has kept: a profile shows them, but none runs."""
    found, run_kept = Counter[str](), RecallingMode.run_kept

    def counted(self: RecallingMode, func: Any, *args: Any, **named: Any) -> Any:
        found[func.name().split(".")[0]] += 1
        return run_kept(self, func, *args, **named)

    RecallingMode.run_kept = counted
    try:
        yield found
    finally:
        RecallingMode.run_kept = run_kept


def _kernels(run: Pass) -> Counter[str]:
    with _counting_recalled() as recalled, profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    found = Counter[str]()

    def visit(event: Any) -> None:
        computes = _computes(event.name)
        if computes is None:
            for child in event.cpu_children:
                visit(child)
        elif computes:
            found[event.name] += 1

    for event in profiler.events():
        if event.cpu_parent is None:
            visit(event)
    return found - recalled


def _moved(run: Pass) -> int:
    with _Moved() as moved:
        run()
    return moved.num_bytes


class _Moved(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.by_operator = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.name().split(".")[0]
        if _computes(name):
            written = sum(map(_size, tree_leaves(out)))
            read = sum(map(_size, tree_leaves((args, kwargs))))
            if name.partition("::")[2] in LOOKUPS:
                sizes = [_size(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
                read = sum(sizes) - max(sizes) + min(written, max(sizes))
            self.num_bytes += read + written
            self.by_operator[name] += read + written
        return out


def _size(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    sizes = (size for size, stride in zip(value.shape, value.stride(), strict=True) if stride)
    return torch.Size(sizes).numel() * value.element_size()
