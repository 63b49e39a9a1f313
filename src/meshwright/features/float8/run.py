"""Float8 on a rank: linear layers are replaced and multiply tensor-parallel shards, weights are cast before the first
micro-batch of a step, and magnitudes reduced after the last backward.

Under tensor parallelism each rank casts its own shards and multiplies them. Current scales of shards may differ, as
each rank scales its product back before products are summed. Delayed scales are shared by all ranks that run a layer.
The magnitudes of all layers of the *model* are one tensor, in which a rank leaves those of other pipeline stages at 0.
So a step has one all-reduce, over all ranks, and a checkpoint one history, which is the same on every rank and on every
layout.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshwright.checkpoint import save_load
from meshwright.checkpoint.manifest import Manifest
from meshwright.comm.collectives import all_reduce_max
from meshwright.errors import LayoutError
from meshwright.features.contract import OnRank, RunFeature
from meshwright.features.float8.linear import AmaxHistory, Float8Linear
from meshwright.features.float8.private import check_device
from meshwright.features.float8.rules import Float8Layers, Float8Recipe
from meshwright.mesh.local_shards import to_local
from meshwright.nn.linear import Linear
from meshwright.parallel.local_shards import local_shard
from meshwright.plan.run_plan import LayerSpec, RunPlan, Stage
from meshwright.train.build_job import Job

HISTORY = "float8.amax_history"
"""Name of the amax history in checkpoints."""


class Float8InRuns(RunFeature):
    """Linear layers in float8."""

    def before_styles(self, part: nn.Module, kind: LayerSpec) -> None:
        if (float8 := kind.part(Float8Layers)) is not None:
            apply_float8(part, float8)

    def start(self, job: Job) -> OnRank:
        return Float8OnRank(job)


def apply_float8(block: nn.Module, float8: Float8Layers) -> None:
    """Replace linear layers of a block by float8 layers with the same parameters and names.

    Raises:
        LayoutError: one of them is not a `nn.linear.Linear`.
    """
    for path in float8.layers:
        layer = block.get_submodule(path)
        if type(layer) is not Linear:
            raise LayoutError(
                f"{path} is {type(layer).__module__}.{type(layer).__name__}, but the plan runs it in float8",
                where="Family.describe, KindFacts.linear_inputs",
                rule="float8 replaces layers of the class meshwright.nn.linear.Linear",
                fix="build the layer as this class, or leave it out of KindFacts.linear_inputs",
            )
    if float8.recipe is Float8Recipe.TORCHAO:
        convert_to_torchao(block, float8.layers)
        return
    for path in float8.layers:
        owner, _, name = path.rpartition(".")
        layer = block.get_submodule(path)
        assert isinstance(layer, Linear)
        setattr(block.get_submodule(owner), name, ParallelFloat8Linear.from_linear(layer))


class ParallelFloat8Linear(Float8Linear):
    """Float8 layer that multiplies its local shard where tensor parallelism shards its weight."""

    # A method of the class: compiled blocks share a graph only if nothing differs from instance to instance.
    def forward(self, x: Any) -> Any:
        """Map […, d] to […, e], a DTensor to another; inside a region, inputs and outputs are local already."""
        if not isinstance(self.weight, DTensor):
            return self.multiply(x, self.weight)
        (placement,), weight = self.weight.placements, local_shard(self.weight)
        if not isinstance(x, DTensor):
            return self.multiply(x, weight)
        features = Shard(x.dim() - 1)
        gradient: Placement = Replicate()
        output: Placement = Replicate()
        if placement.is_shard(0):
            gradient, output = Partial(), features
        elif placement.is_shard(1):
            gradient, output = features, Partial()
        local = self.multiply(x.to_local(grad_placements=[gradient]), weight)
        return DTensor.from_local(local, x.device_mesh, [output], run_check=False)


def convert_to_torchao(module: nn.Module, paths: Collection[str]) -> None:
    """Replace the linear layers at these paths by torchao's, with the same parameters."""
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of kernels that it can't load and nothing here uses
    try:
        # Imported late: torchao is optional, and takes seconds to import.
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        raise LayoutError(
            "torchao isn't installed, but the plan's float8 layers are torchao's",
            where="kinds.float8.recipe",
            rule="every machine of a run has the packages that its plan uses",
            fix="pip install torchao, or make the plan where torchao isn't installed",
        ) from None
    convert_to_float8_training(module, module_filter_fn=lambda _, path: path in paths)


class Float8OnRank(OnRank):
    """Float8 layers of this rank's stages."""

    saved_as = "float8"

    def __init__(self, job: Job) -> None:
        """Give delayed layers their slots, and layers with cached weights their place, on the model's final device."""
        check_device(job.device)
        plan = job.plan
        self._cached: list[Float8Linear] = []
        self._compute = getattr(torch, plan.edge.dtype)
        named = [pair for stage in plan.stages for pair in _layers(plan, stage)]
        delayed = [name for name, one in named if one.recipe is Float8Recipe.DELAYED]
        length = max(one.history for _, one in named)
        self.identity = {"delayed": delayed, "history": length}
        """Facts that a saved amax history must agree with; they do not depend on the layout."""
        self.history = AmaxHistory(len(delayed), length=length, device=job.device) if delayed else None
        numbers = {name: number for number, name in enumerate(delayed)}
        for part in job.parts().values():
            for name, one in _layers(plan, part.stage):
                layer = part.module.get_submodule(name)
                if not isinstance(layer, Float8Linear):
                    continue  # torchao's
                if self.history is not None and name in numbers:
                    layer.slots = self.history.slots(numbers[name])
                if one.cached:
                    self._cached.append(layer)

    def begin(self) -> None:
        """Cast the cached weights, in place."""
        for layer in self._cached:
            # No axis shards it, so this rank's shard is the whole weight.
            layer.refresh_cached_weight(to_local(layer.weight).to(self._compute))

    def end_step(self, *, applied: bool) -> None:
        """Update delayed scales from the magnitudes on all ranks, unless the step was skipped."""
        if self.history is None:
            return
        if applied:
            all_reduce_max(self.history.amax)
            self.history.advance()
        else:
            self.history.discard()

    def evidence(self) -> dict[str, list[float]]:
        """Return the largest magnitudes that scales are made from, and this rank's own in this step."""
        one = self.history
        return {} if one is None else {"known": one.known.tolist(), "own": one.amax.tolist()}

    def state(self) -> dict[str, Tensor]:
        """Return the amax history, equal on all ranks, for a checkpoint; empty without delayed scaling."""
        return {} if self.history is None else {HISTORY: self.history.history}

    def restore(self, path: Path, manifest: Manifest) -> str:
        """Restore the amax history from the checkpoint at `path`; return the reason if it starts empty, else ''."""
        if self.history is None:
            return ""
        if manifest.run.get(self.saved_as) != self.identity:
            has = (
                "has none" if not manifest.run.get(self.saved_as, {}).get("delayed") else "is of other layers or steps"
            )
            return f"delayed float8 scales start from current ones: the checkpoint's amax history {has}"
        save_load.load(path, self.state())
        self.history.refresh()
        return ""


def _layers(plan: RunPlan, stage: Stage) -> Iterator[tuple[str, Float8Layers]]:
    """Yield the full-model names of a stage's float8 layers."""
    for kind, layer in plan.held(stage):
        if (part := kind.part(Float8Layers)) is not None:
            yield from ((kind.full_name(path, layer), part) for path in part.layers)


FEATURE = Float8InRuns()
