"""Compressed gradients and weights in a run: every step settles their errors, and every checkpoint holds them.

The errors of a rank are of the pieces that this rank sends, and of no use on another layout. So a checkpoint has one
tensor of bytes a rank, whatever the number of modules, and says what layout it is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from meshwright.checkpoint import store
from meshwright.checkpoint.manifest import Manifest
from meshwright.comm.compress import EXACT, GRADIENTS, Compression, compress
from meshwright.comm.placement import place
from meshwright.config.pipeline import layers_per_stage
from meshwright.config.schema import RunConfig
from meshwright.models.part import ModelPart


class RunCompression:
    """The compressed collectives of this rank's stages; of none, where nothing is sent or all is sent as it is."""

    def __init__(self, config: RunConfig, parts: Mapping[int, ModelPart], *, rank: int) -> None:
        comm = config.comm
        used = config.mesh.axes().data_parallel() > 1 and (comm.gradients != EXACT or comm.weights != EXACT)
        nodes = None
        if comm.ranks_per_node is not None:
            nodes = [one // comm.ranks_per_node for one in range(config.mesh.axes().num_ranks())]
        self._parts: dict[int, Compression] = {}
        if used:
            placement = place(parts.values(), nodes=nodes, timeout_s=config.train.timeout_s)
            nodes = list(placement.nodes)
            self._parts = {
                stage: compress(
                    part,
                    gradients=comm.gradients,
                    weights=comm.weights,
                    inside_node=comm.inside_node,
                    placement=placement,
                )
                for stage, part in parts.items()
            }
        self._name = f"comm.rank{rank}"
        self.identity: dict[str, Any] = {
            "gradients": comm.gradients,
            "mesh": list(config.mesh.axes().sizes()),
            "layers_per_stage": list(layers_per_stage(config)),
            "freeze": list(config.train.freeze),
            "nodes": nodes,
        }
        """What the errors belong to: where it is the same, they are of the same elements."""

    def settle(self, *, taken: bool) -> None:
        """End a step: its errors go into the next one if the optimizer took it, and are forgotten if not."""
        for part in self._parts.values():
            if taken:
                part.commit()
            else:
                part.discard()

    def state(self) -> dict[str, Tensor]:
        """This rank's errors as a tensor of bytes, for a checkpoint; nothing where there are none."""
        errors = {
            f"{stage}.{key}": value for stage, part in self._parts.items() for key, value in part.state_dict().items()
        }
        if not errors:
            return {}
        return {self._name: torch.frombuffer(bytearray(safetensors.torch.save(errors)), dtype=torch.uint8)}

    def restore(self, path: Path, manifest: Manifest) -> str:
        """Go on with the errors of the checkpoint at `path`. In words, why they start from zero, if they do."""
        if not self._parts or not GRADIENTS[self.identity["gradients"]].feedback:
            return ""
        saved = manifest.run.get("comm")
        if saved != self.identity:
            return f"error feedback starts from zero: the checkpoint {_difference(saved, self.identity)}"
        if self._name in store.tensor_names(path):
            packed = store.read_tensors(path, [self._name])[self._name]
            errors = safetensors.torch.load(packed.numpy().tobytes())
            for stage, part in self._parts.items():
                start = f"{stage}."
                part.load_state_dict({k.removeprefix(start): v for k, v in errors.items() if k.startswith(start)})
        return ""


def _difference(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """How a checkpoint's layout differs, for people."""
    if saved is None:
        return "has none"
    key = next(key for key in now if saved.get(key) != now[key])
    return f"was saved with {key} = {saved.get(key)}, and this run has {now[key]}"
