"""Predict a run's CUDA graphs and their memory from its plan, before it starts.

For the scope `layer`. What blocks save for the backward lies in memory pools instead of PyTorch's allocator, so it is
in the plan's activations already; static tensors and copies of weights come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.capture.plan import CapturePlan, plan_capture
from meshwright.capture.signature import LayerSignature, TensorSignature
from meshwright.capture.verify import verify_capture
from meshwright.plan.cuda_memory import WORKSPACES
from meshwright.plan.run_plan import BYTES, LayerSpec, RunPlan


@dataclass(frozen=True)
class CaptureEstimate:
    """Graphs and memory of the rank with the most of them, in bytes."""

    graphs: int
    pools: int
    static: int
    """Inputs, outputs and gradients at fixed addresses."""
    weights: int
    """Copies of weights that FSDP2 frees, in the compute dtype, and memory for one layer's gradients."""
    saved: int
    """Bytes that forwards leave to backwards, in the pools; part of the plan's activations."""
    inputs: int = 0
    """Part of `static` that layers save for their backwards, so that the plan's activations count it."""

    def added(self) -> int:
        """Return the bytes on a GPU besides those of the same run without graphs: static tensors and copies, and
        cuBLAS's workspaces of the stream that graphs are captured on."""
        return self.static - self.inputs + self.weights + WORKSPACES


def predict_capture(plan: RunPlan, *, mode: str = "slot") -> CaptureEstimate:
    """Return the graphs and memory of the pipeline rank with the most static memory, if all blocks are captured."""
    estimates = [_on_rank(plan, rank, mode) for rank in range(plan.mesh.size("pp"))]
    return max(estimates, key=lambda one: one.static + one.weights)


def capture_plan(plan: RunPlan, rank: int, *, mode: str = "slot") -> CapturePlan:
    """Return the verified capture plan of a pipeline rank, if all blocks are captured.

    Arguments besides the stream, such as conditions and positions, are small and not part of it.
    """
    stages = plan.schedule.stages_of(rank)
    signatures = [[_signature(plan, plan.kind(name)) for name in plan.stages[stage].kinds] for stage in stages]
    made = plan_capture(
        plan.schedule, rank=rank, layers_per_chunk=[len(own) for own in signatures], signatures=signatures, mode=mode
    )
    verify_capture(made)
    return made


def _on_rank(plan: RunPlan, rank: int, mode: str) -> CaptureEstimate:
    made = capture_plan(plan, rank, mode=mode)
    blocks = [plan.kind(name) for stage in plan.schedule.stages_of(rank) for name in plan.stages[stage].kinds]
    compute = BYTES[plan.stages[0].root.compute]
    sizes = [sum(plan.elements(parameter) for parameter in kind.parameters) * compute for kind in blocks]
    return CaptureEstimate(
        graphs=len(made.graphs),
        pools=made.num_pools,
        static=made.buffer_bytes,
        weights=sum(sizes) + max(sizes, default=0) if plan.has_units else 0,
        saved=sum(made.pool_bytes().values()),
        inputs=sum(
            made.num_slots(stage) * sum(layer.input.num_bytes for layer in layers) for stage, layers in made.chunks
        ),
    )


def _signature(plan: RunPlan, kind: LayerSpec) -> LayerSignature:
    edge = plan.edge
    shape = list(edge.shape)
    for shard in edge.shards:
        shape[shard.dim] //= plan.mesh.size(*shard.axes)
    stream = TensorSignature((plan.batch.samples, *shape), edge.dtype)
    kept = kind.saved.under(kind.recompute) * plan.batch.samples if kind.saved is not None else 0
    return LayerSignature(stream, stream, saved_bytes=max(0, kept - math.prod(stream.shape) * BYTES[edge.dtype]))
