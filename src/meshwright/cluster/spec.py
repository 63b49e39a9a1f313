"""Specification of a cluster: the device, the links between devices, and the number of devices per node.

Peak rates are the vendor's figures for dense operands; the fraction that kernels achieve is determined by calibration,
not here. All quantities are per device: a link's bandwidth is that of one device in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

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
            raise ConfigError(
                f"{self.name} has no {rate} rate",
                rule=f"it supports {', '.join(self.peak_flops)}",
                fix="use one of these, or another device",
            )
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


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes. A node is the domain of the fast link, such as a server or an entire rack."""

    name: str
    device: Device
    devices_per_node: int
    inside_node: Link
    between_nodes: Link

    def link(self, num_devices: int) -> Link:
        """Return the slowest link within `num_devices` consecutive devices, starting at a node boundary."""
        return self.inside_node if num_devices <= self.devices_per_node else self.between_nodes
