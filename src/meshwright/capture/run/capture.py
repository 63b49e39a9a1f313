"""Capture layers by a plan, on a device or simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.capture.plan import CaptureMode, CapturePlan, Graph
from meshwright.capture.run.backend import CapturedLayer, LayerGraphs
from meshwright.capture.run.memory_pool import MemoryPool
from meshwright.capture.run.observe import Observation, Observer
from meshwright.capture.run.runner import LayerFailed as LayerFailed
from meshwright.capture.run.runner import Runner
from meshwright.capture.run.simulated_graphs import SimulatedGraphs
from meshwright.capture.run.snapshot import unchanged
from meshwright.capture.run.static_tensors import StaticTensors
from meshwright.capture.run.static_weights import StaticWeights
from meshwright.capture.run.weight_gradients import (
    AccumulatedGradients,
    ReturnedGradients,
    SharedOutputs,
    WeightGradients,
)
from meshwright.capture.verify import verify_capture
from meshwright.errors import CaptureError
from meshwright.nn.deferred_weight_gradients import WeightGradStore


class BackendKind(StrEnum):
    """How graphs are run."""

    CUDA = "cuda"
    SIMULATE = "simulate"
    """Operations run eagerly, in memory laid out as graphs would have it; on any device."""


@dataclass(frozen=True)
class ObservedLayer:
    """A layer to capture, and what its forward was seen to do."""

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    observed: Observation

    @property
    def device(self) -> str:
        """Type of the device that the layer runs on."""
        return next(iter((*self.observed.samples, *self.module.parameters())), torch.empty(0)).device.type


Layers = Mapping[int, Sequence[ObservedLayer]]
"""Layers to capture of each stage on the rank, in the order in which they run."""


def observe(modules: Mapping[int, Sequence[nn.Module]], samples: Mapping[int, Sequence[tuple[Any, ...]]]) -> Layers:
    """Run each layer once, and return what it does. Leaves gradients, generators and buffers as they were.

    Args:
        modules: layers of each stage on the rank, in the order in which they run.
        samples: arguments of each layer. Give a layer the output of the layer before it, the same object, if it reads
            that output as it is; tensors that several layers get must be the same object too.

    Raises:
        CaptureError: a graph can't run a layer; the message says why.
    """
    layers: dict[int, list[ObservedLayer]] = {}
    with unchanged(module for own in modules.values() for module in own):
        for stage, own in modules.items():
            observer, layers[stage] = Observer(), []
            for number, (module, args) in enumerate(zip(own, samples[stage], strict=True)):
                observer.run(module, module.forward, args, {})
                observed, name = observer.found[-1], f"layer {number} of stage {stage}"
                if observed.reasons:
                    raise CaptureError(
                        f"{name} can't be captured: {observed.reasons[0]}",
                        where="capture, observe",
                        rule="a graph neither waits for the device nor moves bytes between ranks",
                        fix="capture a smaller part, or leave the layer eager",
                    )
                layers[stage].append(ObservedLayer(name, module, module.forward, observed))
    return layers


def capture(
    layers: Layers,
    plan: CapturePlan,
    *,
    backend: str = BackendKind.CUDA,
    stores: Mapping[int, WeightGradStore] | None = None,
    copies_weights: bool | None = None,
    returns_gradients: bool | None = None,
) -> Runner:
    """Capture all graphs of a plan, and return their runner. Leaves gradients, generators and buffers as they were.

    Args:
        layers: observed layers (see `observe`).
        plan: plan of the rank; it is verified first.
        backend: `cuda`, or `simulate` on any device.
        stores: store of deferred weight gradients of each stage whose backward is split.
        copies_weights: whether graphs read copies of the weights, which the first micro-batch of a step refreshes. By
            default, if FSDP2 manages the parameters: it allocates gathered weights again in each step.
        returns_gradients: whether autograd accumulates the parameters' gradients. By default, if FSDP2 manages the
            parameters; needed by DistributedDataParallel and other users of gradient hooks too.

    Raises:
        CaptureError: the plan is wrong or doesn't fit the layers.
        LayerFailed: a layer can't be captured.
    """
    verify_capture(plan)
    kind, device = _backend(backend), _device(layers)
    _check_fit(layers, plan)
    outputs = SharedOutputs()
    captured = []
    for stage, own in layers.items():
        for number, one in enumerate(own):
            managed = any(isinstance(p, DTensor) for p in one.module.parameters())
            copies = managed if copies_weights is None else copies_weights
            weights = StaticWeights(one.module, one.observed.weights, copies=copies, device=device)
            gradients: WeightGradients
            if managed if returns_gradients is None else returns_gradients:
                gradients = ReturnedGradients(weights.trained(), outputs)
            else:
                gradients = AccumulatedGradients(weights.current())
            store = (stores or {}).get(stage)
            layer = CapturedLayer(
                stage, number, one.name, one.module, one.forward, one.observed, weights, gradients, store
            )
            captured.append(layer)
    runner = Runner(plan, captured, _maker(kind, plan, device), StaticTensors(plan, device=device))
    with unchanged((one.module for one in captured), (stores or {}).values()):
        runner.capture_all()
    return runner


def _maker(kind: BackendKind, plan: CapturePlan, device: torch.device) -> Callable[[CapturedLayer, Graph], LayerGraphs]:
    """Return what makes the graphs of a layer and instance, in the memory pool that the plan gives them."""
    pools = {graph.pool: MemoryPool() for graph in plan.graphs}
    frees = plan.mode is not CaptureMode.SLOT
    return lambda layer, graph: SimulatedGraphs(layer, pools[graph.pool], frees=frees)


def _backend(name: str) -> BackendKind:
    if name not in set(BackendKind):
        raise CaptureError(
            f"{name} is not a backend",
            where="capture, backend",
            rule=f"the backends are {', '.join(BackendKind)}",
            fix="backend='simulate'",
        )
    return BackendKind(name)


def _check_fit(layers: Layers, plan: CapturePlan) -> None:
    for stage, expected in plan.chunks:
        own = layers.get(stage, ())
        found = tuple(one.observed.signature(_any(expected)) for one in own)
        if [(s.input, s.output, s.follows, s.arguments, s.results) for s in found] != [
            (s.input, s.output, s.follows, s.arguments, s.results) for s in expected
        ]:
            raise CaptureError(
                f"the layers of stage {stage} are not those of the plan: {len(own)} and {len(expected)} layers, or "
                "layers of other shapes",
                where="capture, layers",
                rule="a plan is run with the layers that it was made for",
                fix="signatures=[[one.observed.signature(one.device) for one in own] for own in layers.values()]",
            )


def _any(signatures: Sequence[Any]) -> str:
    return signatures[0].input.device if signatures else "cuda"


def _device(layers: Layers) -> torch.device:
    tensors = (t for own in layers.values() for one in own for t in (*one.observed.samples, *one.module.parameters()))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
