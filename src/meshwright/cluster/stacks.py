"""Software stacks: how the programs that train a model use a device and its links. Doesn't import torch.

A plan's times are those of Meshwright unless another stack is named, as for published runs. One set of parameters
belongs to a stack, never to a run or a model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """Parameters of a software stack."""

    name: str
    hidden_tensor: float = 0.0
    """Share of tensor parallelism's communication that runs beside products."""
    prefetches: bool = True
    """Whether gathers of the next FSDP unit run beside a block's work."""
    hides_reductions: bool = True
    """Whether gradients are reduced beside the rest of the last backward."""
    fused: bool = False
    """Whether kernels bound by memory are fused as in compiled blocks, whatever the plan says."""
    slower_memory: float = 1.0
    """Time of kernels bound by memory over that of the operators that a plan describes."""
    slower_attention: float = 1.0
    """Time of attention over that of the device's best kernel, as of an older or unfused one."""
    slower_ring: float = 0.0
    """Share by which attention is slower for each further rank that it is spread over as a ring: for smaller kernels,
    merged results and exchanges that nothing hides."""
    slower_products: float = 1.0
    """Time of products over that of the device's libraries as they were measured, as of older ones."""
    slower_float8: float = 1.0
    """The same of products in float8 only, as of another kernel."""
    slower_beside: float = 0.0
    """Share of hidden communication's time by which it slows the work beside it, as it takes processors and bandwidth.
    """


MESHWRIGHT = Stack("meshwright")
