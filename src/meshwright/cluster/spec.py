"""What a cluster is, as values: a device, the links that join devices, and how many share a node.

Peak rates are what the vendor publishes for dense operands; what a kernel reaches of them is a matter of
calibration, not of this file. Every quantity is a device's own: a link's bandwidth is what one device sends in
one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from meshwright.errors import ConfigError


class Rate(StrEnum):
    """Number formats that devices have separate peak rates for. TF32 is float32 operands on tensor cores."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU process.

    Attributes:
        peak_flops: floating-point operations a second by number format, dense.
        memory_bytes: memory as the data sheet rounds it; CUDA shows one or two per cent less.
        memory_bandwidth_bytes_per_s: reads and writes together.
        launch_overhead_us: time from one kernel's launch to the next, when the host is the bottleneck.
        source: where the figures come from.
    """

    name: str
    peak_flops: Mapping[Rate, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_overhead_us: float
    source: str

    def peak(self, rate: Rate) -> float:
        """The peak rate for a number format.

        Raises:
            ConfigError: the device does not compute in it.
        """
        if rate not in self.peak_flops:
            raise ConfigError(
                f"{self.name} has no {rate} rate",
                rule=f"it computes in {', '.join(self.peak_flops)}",
                fix="one of these, or another device",
            )
        return self.peak_flops[rate]


@dataclass(frozen=True)
class Link:
    """How a device reaches others: `latency_us + bytes / bandwidth` for a message.

    Attributes:
        bandwidth_bytes_per_s: of one port, in one direction.
        ports: transfers to different devices that a device drives at once, each at the full bandwidth. A switch
            that spreads every transfer over all of a device's lanes is one port.
        source: where the figures come from.
    """

    name: str
    latency_us: float
    bandwidth_bytes_per_s: float
    ports: int
    source: str

    def time_us(self, num_bytes: float) -> float:
        """Time of one message through one port."""
        return self.latency_us + num_bytes / self.bandwidth_bytes_per_s * 1e6


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. A node is the reach of the fast link: a server, or a whole rack."""

    name: str
    device: Device
    devices_per_node: int
    inside_node: Link
    between_nodes: Link

    def link(self, num_devices: int) -> Link:
        """The slowest link that a group of `num_devices` neighbours, starting at a node's first, uses."""
        return self.inside_node if num_devices <= self.devices_per_node else self.between_nodes
