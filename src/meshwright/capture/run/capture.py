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
from meshwright.capture.run.backend import CapturedLayer, MakeGraphs
from meshwright.capture.run.call import flatten
from meshwright.capture.run.eager_graphs import EagerGraphs
from meshwright.capture.run.memory_pool import MemoryPool
from meshwright.capture.run.observe import Observation, Observer
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
from meshwright.capture.signature import LayerSignature
from meshwright.capture.verify import verify_capture
from meshwright.errors import CaptureError
from meshwright.nn.deferred_weight_gradients import WeightGradStore
from meshwright.pipeline.actions import BACKWARDS, ActionKind
from meshwright.units import counted


class BackendKind(StrEnum):
    """How graphs are run."""

    CUDA = "cuda"
    EAGER = "eager"
    """Operations run eagerly on static tensors, so that faults of static tensors and of capturing are told apart."""
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
        samples: arguments of each layer; None as the first one stands for the output of the layer before it, which the
            layer then reads as it is. Tensors that several layers get must be the same objects.

    Raises:
        CaptureError: a graph can't run a layer; the message says why.
    """
    layers: dict[int, list[ObservedLayer]] = {}
    with unchanged(module for own in modules.values() for module in own):
        for stage, own in modules.items():
            observer, layers[stage], last = Observer(), [], None
            for number, (module, args) in enumerate(zip(own, samples[stage], strict=True)):
                filled = (last, *args[1:]) if args[0] is None else args
                results = flatten(observer.run(module, module.forward, filled, {}))[1]
                observed, name = observer.found[-1], f"layer {number} of stage {stage}"
                if observed.reasons:
                    raise CaptureError(
                        f"{name} can't be captured: {observed.reasons[0]}",
                        where="capture, observe",
                        rule="a graph neither waits for the device nor moves bytes between ranks",
                        fix="capture a smaller part, or leave the layer eager",
                    )
                last = results[observed.main]
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
        backend: `cuda`, or on any device `eager` or `simulate`; see `BackendKind`.
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
    device = _device(layers)
    kind = _backend(backend, device)
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
    statics = StaticTensors(plan, device=device, poisons=kind is BackendKind.SIMULATE)
    runner = Runner(plan, captured, _maker(kind, plan, device), statics)
    with unchanged((one.module for one in captured), (stores or {}).values()):
        runner.capture_all()
    return runner


def _maker(kind: BackendKind, plan: CapturePlan, device: torch.device) -> MakeGraphs:
    """Return what makes the graphs of a layer and instance, in the memory pool that the plan gives them."""
    kinds: dict[tuple[int, int, int], set[ActionKind]] = {}
    for graph in plan.graphs:
        kinds.setdefault((graph.stage, graph.layer, graph.instance), set()).add(graph.kind)

    def backwards(graph: Graph) -> int:
        return len(kinds[graph.stage, graph.layer, graph.instance] & BACKWARDS)

    if kind is BackendKind.CUDA:
        from meshwright.capture.run.cuda_graphs import CudaGraphs, CudaPools

        cuda = CudaPools(device)
        return MakeGraphs(
            lambda layer, graph: CudaGraphs(layer, cuda, graph.pool, backwards=backwards(graph)), cuda.num_bytes
        )
    if kind is BackendKind.EAGER:
        return MakeGraphs(lambda layer, graph: EagerGraphs(layer, backwards=backwards(graph)), lambda: 0)
    pools = {graph.pool: MemoryPool() for graph in plan.graphs}
    frees = plan.mode is not CaptureMode.SLOT
    return MakeGraphs(
        lambda layer, graph: SimulatedGraphs(layer, pools[graph.pool], frees=frees, backwards=backwards(graph)),
        lambda: sum(pool.close() for pool in pools.values()),
    )


def _backend(name: str, device: torch.device) -> BackendKind:
    if name not in set(BackendKind):
        raise CaptureError(
            f"{name} is not a backend",
            where="capture, backend",
            rule=f"the backends are {', '.join(BackendKind)}",
            fix="backend='simulate'",
        )
    if name == BackendKind.CUDA and device.type != "cuda":
        raise CaptureError(
            f"the layers are on {device.type}",
            where="capture, backend",
            rule="the backend cuda captures layers on a CUDA device",
            fix="backend='simulate', or layers on a CUDA device",
        )
    return BackendKind(name)


def _check_fit(layers: Layers, plan: CapturePlan) -> None:
    for stage, expected in plan.chunks:
        own = layers.get(stage, ())
        pairs = zip(own, expected, strict=False)
        if len(own) != len(expected) or not all(_fits(one, due, at) for at, (one, due) in enumerate(pairs)):
            raise CaptureError(
                f"the layers of stage {stage} are not those of the plan: {counted(len(own), 'layer')} instead of "
                f"{len(expected)}, or layers of other shapes",
                where="capture, layers",
                rule="a plan is run with the layers that it was made for",
                fix="signatures=[[one.observed.signature(one.device) for one in own] for own in layers.values()]",
            )


def _fits(one: ObservedLayer, due: LayerSignature, at: int) -> bool:
    """Return whether a layer was seen to be what the plan says; a plan may assume eager code where there is none."""
    found = one.observed.signature(due.input.device)
    follows = at > 0 and due.follows and due.input == due.output
    return (found.input, found.output, found.arguments, found.results) == (
        (due.input, due.output, due.arguments, due.results)
    ) and (found.follows or not follows)


def _device(layers: Layers) -> torch.device:
    tensors = (t for own in layers.values() for one in own for t in (*one.observed.samples, *one.module.parameters()))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
