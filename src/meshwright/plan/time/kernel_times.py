"""Times of a kind's kernels per micro-batch: products, attention and kernels bound by memory, and the host's work of
launching them. Doesn't import torch.

A product takes the longer of its operations at the rate of its shape and its bytes at the memory's bandwidth. The
backward has one product for the gradient of its input and one for that of its weight. Recomputation runs forwards
again, but for those whose results a policy keeps or whose results nothing needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import add
from typing import NamedTuple, TypeVar

from meshwright.cluster.hardware import Device
from meshwright.cluster.performance import Performance, ProductCurve
from meshwright.cluster.stacks import Stack
from meshwright.errors import ConfigError
from meshwright.models.contract.operators import OperatorKind, Rerun
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.run_plan import BYTES, LayerSpec, PlannedKernels, PlannedOperator

C = TypeVar("C")
NOTHING = PlannedKernels()
ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward over those of its forward: five products instead of two (Dao 2023)."""
OPERAND_BYTES = {**BYTES, "float8": 1}
"""Bytes of an element that a product multiplies, by `PlannedOperator.rate`."""


class Work(NamedTuple):
    """Time of kernels on the device in µs, by what bounds it, and of the host that launches them."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    host: float = 0.0
    flops: float = 0.0
    """Operations that products and attention count."""

    @property
    def on_device(self) -> float:
        return self.products + self.attention + self.memory

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(*map(add, self, other))

    def beside(self, performance: Performance, processes: float) -> Work:
        """Return the work with its times while so many processes share a machine's cores."""
        if not performance.cores:
            return self
        times = ((name, us) for name, us in self._asdict().items() if name != "flops")
        return self._replace(**{name: us * performance.slower(name, processes) for name, us in times})


@dataclass(frozen=True)
class KindWork:
    """Work of a kind per micro-batch, by pass."""

    forward: Work
    backward_input: Work
    backward_weight: Work
    recompute: Work


class KernelTimes:
    """Prices of kernels on a device."""

    def __init__(self, device: Device, performance: Performance, stack: Stack, *, processes: float = 1) -> None:
        """`processes` of a node compute at a time, which matters where they share a CPU's cores."""
        self._performance, self._stack, self._processes = performance, stack, processes
        self._bytes_per_us = device.memory_bandwidth_bytes_per_s * performance.memory_efficiency / 1e6

    def of_kind(self, kind: LayerSpec, *, samples: int, tokens: int) -> KindWork:
        """Return the work of a kind on a micro-batch of `samples` samples of `tokens` tokens."""
        compiled = kind.compiled or self._stack.fused
        length = _length(kind, tokens)
        found = [self._passes(one, samples, length, compiled) for one in kind.operators]
        rerun = (work[0] for work, one in zip(found, kind.operators, strict=True) if runs_again(one, kind.recompute))
        forward, to_input, to_weight = (sum((work[number] for work in found), Work()) for number in range(3))
        passes = (forward, to_input, to_weight, sum(rerun, Work()))
        return KindWork(*(work.beside(self._performance, self._processes) for work in passes))

    def _passes(self, one: PlannedOperator, samples: int, length: float, compiled: bool) -> tuple[Work, Work, Work]:
        """Return the work of an operator's forward, and of the gradients of its input and weight."""
        forward, backward = one.forward, one.backward
        if compiled or (one.fused_on_cuda and self._performance.is_async):
            forward, backward = one.fused_forward or NOTHING, one.fused_backward or NOTHING
        to_forward, to_input = (self._kernels(kernels, samples, compiled) for kernels in (forward, backward))
        if one.kind is OperatorKind.ATTENTION:
            attention = self._attention(one, samples, length, compiled)
            return _of_attention(attention[0], to_forward), _of_attention(attention[1], to_input), Work()
        if one.kind is OperatorKind.MEMORY or not one.rows:
            return to_forward, to_input, Work()
        curve = _curve(self._performance.products, one.rate, "products")
        m, k, n = one.rows * samples / one.groups, one.inner, one.columns
        forward_product, input_product, weight_product = (
            self._product(one, shape, slower, compiled)
            for shape, slower in (
                ((m, k, n), 1.0),
                ((m, n, k), curve.input_gradient_slower),
                ((k, m, n), curve.weight_gradient_slower),
            )
        )
        to_input = to_input + input_product if one.inputs else to_input
        return to_forward + forward_product, to_input, weight_product if one.weights else Work()

    def _kernels(self, kernels: PlannedKernels, samples: int, compiled: bool) -> Work:
        moved = kernels.num_bytes * samples + kernels.bytes_once
        us = moved / self._bytes_per_us * self._stack.slower_memory
        return Work(memory=us, host=self._launches(kernels.launches, compiled))

    def _product(self, one: PlannedOperator, shape: tuple[float, float, float], slower: float, compiled: bool) -> Work:
        m, k, n = shape
        curve, size = product_curve(self._performance, one.rate), OPERAND_BYTES[one.rate]
        moved = size * (m * k + k * n + m * n) / self._bytes_per_us
        slower *= self._stack.slower_products * (self._stack.slower_float8 if one.rate == "float8" else 1.0)
        each = max(slower * curve.seconds(m, k, n) * 1e6, moved)
        launches = 1 if one.kind is OperatorKind.GROUPED and self._performance.is_async else one.groups
        return Work(
            products=one.groups * each, host=self._launches(launches, compiled), flops=2.0 * one.groups * m * k * n
        )

    def _attention(self, one: PlannedOperator, samples: int, length: float, compiled: bool) -> tuple[Work, Work]:
        curve = _curve(self._performance.attention, one.rate, "attention")
        flops = float(one.attention_flops * samples)
        forward = flops / curve.flops_per_s * 1e6 * (length + curve.half_length) / length * self._stack.slower_attention
        backward = ATTENTION_BACKWARD * forward * curve.backward_slower
        host = self._launches(1, compiled)
        return (
            Work(attention=forward, host=host, flops=flops),
            Work(attention=backward, host=host, flops=ATTENTION_BACKWARD * flops),
        )

    def _launches(self, number: float, compiled: bool) -> float:
        host = self._performance.host
        return number * (host.compiled_launch_us if compiled else host.launch_us)


def runs_again(one: PlannedOperator, policy: RecomputePolicy) -> bool:
    """Return whether recomputation under a policy runs an operator's forward again."""
    if policy is RecomputePolicy.NONE or one.rerun is Rerun.NEVER:
        return False
    return one.rerun is Rerun.ALWAYS or policy is RecomputePolicy.FULL


def _length(kind: LayerSpec, tokens: int) -> float:
    """Return the length of a sample's documents by which attention's rate falls: pairs are computed at their own's."""
    if kind.attention is None or kind.attention.mask.documents is None:
        return tokens
    mask = kind.attention.mask
    pairs = [(one, mask.num_pairs_before(one, one)) for one in mask.lengths(0, tokens)]
    return sum(number for _, number in pairs) / sum(number / one for one, number in pairs)


def _of_attention(work: Work, kernels: Work) -> Work:
    """Return attention's work, which takes the longer of its operations and of what its kernels read and write."""
    longer = max(work.attention, kernels.memory)
    return Work(attention=longer, host=work.host + kernels.host, flops=work.flops)


def product_curve(performance: Performance, rate: str) -> ProductCurve:
    """Return the curve of products of a dtype.

    Raises:
        ConfigError: the cluster has none.
    """
    return _curve(performance.products, rate, "products")


def _curve(curves: Mapping[str, C], rate: str, what: str) -> C:
    if rate not in curves:
        rule = f"the cluster has rates of {what} for {', '.join(curves)}"
        fix = "another train.precision, another device, or a file of meshwright calibrate"
        raise ConfigError(f"the rate of {what} in {rate} is unknown", where="cluster", rule=rule, fix=fix)
    return curves[rate]


def residuals(performance: Performance, rates: Iterable[str]) -> dict[str, float]:
    """Return the residual of each part of `Work`; of products and attention, that of the least certain of the rates."""
    used = set(rates)
    return {
        "products": max((one.residual for rate, one in performance.products.items() if rate in used), default=0.0),
        "attention": max((one.residual for rate, one in performance.attention.items() if rate in used), default=0.0),
        "memory": performance.memory_residual,
        "host": performance.host.residual,
    }
