"""Performance of a device and its links: what they achieve of their peak rates, with residuals, as measured by
`meshwright calibrate` or, for presets, fitted to published runs. Doesn't import torch.

The time of a product is the larger of its operations over the rate that products of its shape achieve and its bytes
over the memory's bandwidth. A rate falls with each dim that is small beside the dim at which half of the rate is
reached. A collective of n ranks takes a latency per step and its bytes over the bandwidth that its links achieve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProductCurve:
    """Rate of matrix products of a dtype: `peak · r/(r + half_rows) · k/(k + half_inner) · c/(c + half_columns)`."""

    flops_per_s: float
    """Rate of products that are large along all dims."""
    half_rows: float = 0.0
    half_inner: float = 0.0
    half_columns: float = 0.0
    input_gradient_slower: float = 1.0
    """Time of the product for an input's gradient over that of a forward of its shape: another memory layout."""
    weight_gradient_slower: float = 1.0
    residual: float = 0.1
    """Standard deviation of the logarithm of measured over predicted time."""

    def seconds(self, rows: float, inner: float, columns: float) -> float:
        """Return the time of the operations of a forward's product."""
        if rows <= 0:
            return 0.0
        shares = ((rows, self.half_rows), (inner, self.half_inner), (columns, self.half_columns))
        slower = 1.0
        for size, half in shares:
            slower *= (size + half) / size
        return 2.0 * rows * inner * columns * slower / self.flops_per_s


@dataclass(frozen=True)
class AttentionCurve:
    """Rate of attention's operations, which grows with the length that a query sees."""

    flops_per_s: float
    half_length: float = 0.0
    backward_slower: float = 1.0
    """Time of the backward over that of 2.5 forwards."""
    residual: float = 0.15


@dataclass(frozen=True)
class LinkCurve:
    """What collectives achieve on a link."""

    latency_us: float
    """Time of a step of a collective that moves nothing."""
    efficiency: float = 1.0
    """Share of the link's bandwidth that large messages achieve."""
    half_bytes: float = 0.0
    """Bytes per step at which half of it is reached."""
    reduce_scatter_slower: float = 1.0
    """Time of a reduce-scatter's bytes over that of an all-gather's."""
    cached_bytes: float = 0.0
    """Bytes of a tensor that CPUs' caches hold, so that they move faster than the rest; 0 without such a difference."""
    uncached_slower: float = 1.0
    """Time of a byte of the rest over that of a cached one."""
    residual: float = 0.2

    def cached(self, num_bytes: float) -> float:
        """Return how many cached bytes take as long as those of a tensor."""
        return num_bytes + (self.uncached_slower - 1) * max(0.0, num_bytes - self.cached_bytes)


@dataclass(frozen=True)
class HostCosts:
    """Time of the process that launches kernels, in µs. It overlaps the device's unless that is the CPU."""

    launch_us: float = 5.0
    """Per kernel run eagerly, with its share of Python, autograd and dispatch."""
    compiled_launch_us: float = 3.0
    """Per kernel of a compiled block."""
    block_us: float = 0.0
    """Per forward, and per backward, of a block: hooks and modules' calls."""
    unit_us: float = 0.0
    """Per gather, and per reduction, of an FSDP unit: hooks and copies into flat buffers."""
    styled_us: float = 0.0
    """Per collective of an operator under tp."""
    action_us: float = 0.0
    """Per action of a pipeline's schedule."""
    step_us: float = 0.0
    """Per step: data, the loss's scalars, clipping, logs."""
    parameter_us: float = 0.0
    """Per parameter and step: the optimizer's and the norm's kernels."""
    residual: float = 0.2


@dataclass(frozen=True)
class Performance:
    """What a device, its host and its links achieve."""

    source: str
    """Where the figures come from: a calibration with its device and versions, or the runs that they were fitted to."""
    products: Mapping[str, ProductCurve] = field(hash=False)
    """By dtype: float32, bfloat16, float16, float64, float8."""
    attention: Mapping[str, AttentionCurve] = field(hash=False)
    memory_efficiency: float
    """Share of the memory's bandwidth that kernels bound by it achieve."""
    memory_residual: float
    host: HostCosts
    links: Mapping[str, LinkCurve] = field(hash=False)
    """By level: `inside_node`, `between_nodes`, `between_pods`."""
    is_async: bool = True
    """Whether the device runs beside the host that launches its kernels, as a GPU does."""
    cores: int = 0
    """Cores that a machine's processes share, if the device is a CPU; 0 otherwise."""
    shared: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Time of `products`, `attention`, `memory` and `host` while all cores are busy, over their time alone: cores share
    caches, bandwidth and, where they are threads of one core, its units."""
    update_efficiency: float = 0.0
    """As `memory_efficiency`, of the optimizer's update; 0 if it is the same."""
    residual: float = 0.0
    """Standard deviation of the logarithm of measured over predicted times of small runs' steps, on one process."""
    group_residual: float = 0.0
    """As `residual`, of several processes."""

    def slower(self, part: str, processes: float) -> float:
        """Return the time of a part of the work while so many processes share the cores, over its time alone."""
        if not self.cores or processes <= 1:
            return 1.0
        full = self.shared.get(part, 1.0)
        if processes >= self.cores:
            return full * processes / self.cores
        return 1 + (full - 1) * (processes - 1) / (self.cores - 1)
