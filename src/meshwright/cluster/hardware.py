"""Specification of clusters: devices, the links between them, and what both achieve. Doesn't import torch.

Peak rates are the vendor's figures for dense operands; what kernels and collectives achieve of them is `Performance`.
All quantities are per device: a link's bandwidth is that of one device in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from meshwright.cluster.performance import LinkCurve, Performance
from meshwright.errors import ConfigError


class Rate(StrEnum):
    """Number formats with separate peak rates. TF32 means float32 operands on tensor cores."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True)
class Device:
    """An accelerator, or a CPU process.

    Attributes:
        peak_flops: dense floating-point operations per second, by number format.
        memory_bytes: memory capacity as rounded in the data sheet; CUDA reports one or two percent less.
        memory_bandwidth_bytes_per_s: total of reads and writes.
        launch_overhead_us: time between kernel launches if the host is the bottleneck.
        source: source of the figures.
    """

    name: str
    peak_flops: Mapping[Rate, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_overhead_us: float
    source: str

    def peak(self, rate: Rate) -> float:
        """Return the peak rate for a number format.

        Raises:
            ConfigError: the device does not support the format.
        """
        if rate not in self.peak_flops:
            rule = f"it supports {', '.join(self.peak_flops)}"
            raise ConfigError(f"{self.name} has no {rate} rate", rule=rule, fix="use one of these, or another device")
        return self.peak_flops[rate]


@dataclass(frozen=True)
class Link:
    """A link between devices; a message takes `latency_us + bytes / bandwidth`.

    Attributes:
        bandwidth_bytes_per_s: bandwidth of one port in one direction.
        ports: number of concurrent transfers to different devices at full bandwidth each. A switch that spreads each
            transfer over all of a device's lanes counts as one port.
        source: source of the figures.
    """

    name: str
    latency_us: float
    bandwidth_bytes_per_s: float
    ports: int
    source: str

    def time_us(self, num_bytes: float) -> float:
        """Return the transfer time of one message through one port."""
        return self.latency_us + num_bytes / self.bandwidth_bytes_per_s * 1e6


class Level(StrEnum):
    """Links by what they connect, from the fastest to the slowest."""

    INSIDE_NODE = "inside_node"
    BETWEEN_NODES = "between_nodes"
    BETWEEN_PODS = "between_pods"


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes. A node is the domain of the fast link, such as a server or an entire rack; a pod is
    the nodes that the network connects without a bottleneck, such as those below one spine switch."""

    name: str
    device: Device
    devices_per_node: int
    inside_node: Link
    between_nodes: Link
    performance: Performance
    nodes_per_pod: int | None = None
    """None if all nodes form one pod."""
    between_pods: Link | None = None
    """None if it is the link between nodes."""

    def level(self, num_devices: int) -> Level:
        """Return the outermost level within `num_devices` consecutive devices, starting at a pod boundary."""
        if num_devices <= self.devices_per_node:
            return Level.INSIDE_NODE
        if self.nodes_per_pod is None or num_devices <= self.devices_per_node * self.nodes_per_pod:
            return Level.BETWEEN_NODES
        return Level.BETWEEN_PODS

    def link(self, num_devices: int) -> Link:
        """Return the slowest link within `num_devices` consecutive devices, starting at a pod boundary."""
        return self.link_at(self.level(num_devices))

    def link_at(self, level: Level) -> Link:
        """Return the link of a level."""
        if level == Level.BETWEEN_PODS:
            return self.between_pods or self.between_nodes
        return self.inside_node if level == Level.INSIDE_NODE else self.between_nodes

    def curve(self, level: Level) -> LinkCurve:
        """Return what collectives achieve on the link of a level; without a curve, its latency and bandwidth."""
        links = self.performance.links
        if level == Level.BETWEEN_PODS and level not in links and self.between_pods is None:
            level = Level.BETWEEN_NODES
        return links.get(level) or LinkCurve(self.link_at(level).latency_us)
