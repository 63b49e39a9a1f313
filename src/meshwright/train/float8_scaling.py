"""Float8 work that is done once per step: weights are cast before the first micro-batch, and magnitudes reduced after
the last backward.

Delayed scales are shared by all ranks that run a layer. The magnitudes of all layers of the *model* are one tensor, in
which a rank leaves those of other pipeline stages at 0. So a step has one all-reduce, over all ranks, and a checkpoint
one history, which is the same on every rank and on every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.checkpoint import save_load
from meshwright.checkpoint.manifest import Manifest
from meshwright.comm.collectives import all_reduce_max
from meshwright.mesh.local_shards import to_local
from meshwright.nn.float8.recipe import Float8Recipe
from meshwright.parallel.rank_model import StagePart
from meshwright.plan.block_layers import Float8Layers
from meshwright.plan.run_plan import RunPlan, Stage

if TYPE_CHECKING:
    from meshwright.nn.float8.amax import AmaxHistory
    from meshwright.nn.float8.linear import Float8Linear

HISTORY = "float8.amax_history"
"""Name of the amax history in checkpoints."""


class RunFloat8:
    """Float8 layers of this rank's stages; does nothing without any."""

    def __init__(self, plan: RunPlan, parts: Mapping[int, StagePart], device: torch.device) -> None:
        """Give delayed layers their slots, and layers with cached weights their place, on the model's final device."""
        self._cached: list[Float8Linear] = []
        self._compute = getattr(torch, plan.edge.dtype)
        self._history: AmaxHistory | None = None
        delayed = [
            name for stage in plan.stages for name, one in _layers(plan, stage) if one.recipe is Float8Recipe.DELAYED
        ]
        lengths = {kind.float8.history for kind in plan.kinds if kind.float8 is not None}
        self.identity: dict[str, Any] = {"delayed": delayed, "history": max(lengths, default=0)}
        """Facts that a saved amax history must agree with; they do not depend on the layout."""
        if not lengths:
            return
        from meshwright.nn.float8.amax import AmaxHistory
        from meshwright.nn.float8.linear import Float8Linear

        if delayed:
            self._history = AmaxHistory(len(delayed), length=max(lengths), device=device)
        numbers = {name: number for number, name in enumerate(delayed)}
        for part in parts.values():
            for name, one in _layers(plan, part.stage):
                layer = part.module.get_submodule(name)
                if not isinstance(layer, Float8Linear):
                    continue  # torchao's
                if self._history is not None and name in numbers:
                    layer.slots = self._history.slots(numbers[name])
                if one.cached:
                    self._cached.append(layer)

    def begin(self) -> None:
        """Start a step: cast the cached weights, in place."""
        for layer in self._cached:
            # No axis shards it, so this rank's shard is the whole weight.
            layer.refresh_cached_weight(to_local(layer.weight).to(self._compute))

    def settle(self, *, taken: bool) -> None:
        """End a step: update delayed scales from the magnitudes on all ranks, unless the step was skipped."""
        if self._history is None:
            return
        if taken:
            all_reduce_max(self._history.amax)
            self._history.advance()
        else:
            self._history.discard()

    def state(self) -> dict[str, Tensor]:
        """Return the amax history, equal on all ranks, for a checkpoint; empty without delayed scaling."""
        return {} if self._history is None else {HISTORY: self._history.history}

    def restore(self, path: Path, manifest: Manifest) -> str:
        """Restore the amax history from the checkpoint at `path`; return the reason if it starts empty, else ''."""
        if self._history is None:
            return ""
        if manifest.run.get("float8") != self.identity:
            has = "has none" if not manifest.run.get("float8", {}).get("delayed") else "is of other layers or steps"
            return f"delayed float8 scales start from current ones: the checkpoint's amax history {has}"
        save_load.load(path, self.state())
        self._history.refresh()
        return ""


def _layers(plan: RunPlan, stage: Stage) -> Iterator[tuple[str, Float8Layers]]:
    """Yield the full-model names of a stage's float8 layers."""
    for kind, layer in plan.held(stage):
        if kind.float8 is not None:
            yield from ((kind.full_name(path, layer), kind.float8) for path in kind.float8.layers)
