"""Float8 work that is done once per step: weights are cast before the first micro-batch, and magnitudes reduced after
the last backward.

Delayed scales are shared by all ranks that run a layer. The magnitudes of all layers of the *model* are one tensor, in
which a rank leaves those of other pipeline stages at 0. So a step has one all-reduce, over all ranks, and a checkpoint
one history, which is the same on every rank and on every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint import save_load
from meshwright.checkpoint.manifest import Manifest
from meshwright.comm.collectives import all_reduce_max
from meshwright.features.contract import OnRank
from meshwright.mesh.local_shards import to_local
from meshwright.nn.float8.amax import AmaxHistory
from meshwright.nn.float8.linear import Float8Linear
from meshwright.nn.float8.recipe import Float8Recipe
from meshwright.plan.run_plan import Float8Layers, RunPlan, Stage
from meshwright.train.build_job import Job

HISTORY = "float8.amax_history"
"""Name of the amax history in checkpoints."""


class Float8OnRank(OnRank):
    """Float8 layers of this rank's stages."""

    saved_as = "float8"

    def __init__(self, job: Job) -> None:
        """Give delayed layers their slots, and layers with cached weights their place, on the model's final device."""
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


start = Float8OnRank


def _layers(plan: RunPlan, stage: Stage) -> Iterator[tuple[str, Float8Layers]]:
    """Yield the full-model names of a stage's float8 layers."""
    for kind, layer in plan.held(stage):
        if kind.float8 is not None:
            yield from ((kind.full_name(path, layer), kind.float8) for path in kind.float8.layers)
