"""A cluster whose kernels and links have constant rates, so that times can be computed by hand.

In a µs the device computes 1,000 operations or moves 100 bytes, and each link moves 10 bytes in each direction. Nothing
has a latency, and the host takes no time, unless a test says so.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.cluster.hardware import Cluster, Level, Link
from meshwright.cluster.performance import AttentionCurve, HostCosts, LinkCurve, Performance, ProductCurve
from meshwright.cluster.presets import cluster_preset

FLOPS, MOVED, SENT = 1000.0, 100.0, 10.0
RATES = ("float32", "bfloat16", "float64", "float8")
NO_HOST = HostCosts(launch_us=0.0, compiled_launch_us=0.0, residual=0.0)


def constant_rates(*, host: HostCosts = NO_HOST, is_async: bool = True, cores: int = 0, residual: float = 0.0,
                   latency_us: float = 0.0) -> Cluster:  # fmt: skip
    """The cluster; one that isn't async waits for each kernel and collective, as a CPU does."""
    base = cluster_preset("H100")
    link = Link("a link", latency_us, SENT * 1e6, 1, "none")
    device = replace(base.device, memory_bandwidth_bytes_per_s=MOVED * 1e6)
    performance = Performance(
        source="a test",
        products={rate: ProductCurve(FLOPS * 1e6, residual=residual) for rate in RATES},
        attention={rate: AttentionCurve(FLOPS * 1e6, residual=residual) for rate in RATES},
        memory_efficiency=1.0,
        memory_residual=residual,
        host=host,
        links={level: LinkCurve(latency_us, residual=residual) for level in Level},
        is_async=is_async,
        cores=cores,
    )
    return replace(base, device=device, performance=performance, inside_node=link, between_nodes=link,
                   between_pods=link, devices_per_node=10**6)  # fmt: skip
