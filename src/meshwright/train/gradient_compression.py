"""Compressed gradients and weights in a run, with error feedback kept across steps and checkpoints.

A rank's error feedback belongs to the shards this rank sends and is useless on another layout. A checkpoint therefore
holds one byte tensor per rank, regardless of the number of modules, and records its layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.checkpoint import save_load
from meshwright.checkpoint.manifest import Manifest
from meshwright.comm.compression.catalogue import EXACT, find_method
from meshwright.config.schema import RunConfig
from meshwright.parallel.rank_model import StagePart
from meshwright.plan.collective_bytes import Purpose
from meshwright.plan.compare import hashes
from meshwright.plan.run_plan import RunPlan, Unit
from meshwright.plan.traffic import LinkBytes, Traffic, TrafficEntry

if TYPE_CHECKING:
    from meshwright.comm.compression.fsdp_collectives import SentBytes
    from meshwright.comm.compression.fsdp_compress import Compression


class RunCompression:
    """Compressed collectives of this rank's stages; empty without compression."""

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        parts: Mapping[int, StagePart],
        mesh: DeviceMesh | None,
        *,
        rank: int,
    ) -> None:
        self._name = f"comm.rank{rank}"
        self._parts: dict[int, Compression] = {}
        gradients = sorted({unit.gradients for stage in plan.stages for unit in plan.units(stage)})
        self._has_feedback = any(find_method(name).feedback for name in gradients)
        self.identity: dict[str, Any] = {
            "gradients": gradients[0] if len(gradients) == 1 else gradients,
            "mesh": list(config.mesh.axes().sizes()),
            "layers_per_stage": [len(stage.kinds) for stage in plan.stages],
            "freeze": list(config.train.freeze),
            "layout": hashes(plan).layout,
        }
        """Identity of the error feedback: errors are interchangeable only if it is equal. The plan's hash suffices;
        the other keys explain a mismatch to the user and are all that checkpoints predating plans have."""
        units = [unit for stage in plan.stages for unit in plan.units(stage)]
        sends = plan.mesh.view("fsdp") + plan.mesh.view("replicas")
        if mesh is None or not sends or all(unit.gradients == unit.weights == EXACT for unit in units):
            return
        from meshwright.comm.compression.fsdp_compress import Replicas, compress
        from meshwright.comm.node_groups import place

        modules = {number: part.module for number, part in parts.items()}
        placement = place(modules.values(), nodes=_nodes(plan), timeout_s=config.train.timeout_s)
        self.identity["nodes"] = list(placement.nodes)
        for number, part in parts.items():
            by_module = dict(_unit_modules(part))
            self._parts[number] = compress(
                part.module,
                gradients={name: unit.gradients for name, unit in by_module.items()},
                weights={name: unit.weights for name, unit in by_module.items()},
                inside_node={name: unit.inside_node for name, unit in by_module.items()},
                placement=placement,
                replicas=Replicas(mesh.get_group("dp_replicate"), sums=True) if plan.mesh.view("replicas") else None,
            )

    def settle(self, *, taken: bool) -> None:
        """End a step: keep its error feedback if the optimizer took the step, otherwise discard it."""
        for part in self._parts.values():
            if taken:
                part.commit()
            else:
                part.discard()

    def sent(self) -> SentBytes | None:
        """Return the number of gradient and weight bytes sent by this rank, or None without compression."""
        sent = [part.sent() for part in self._parts.values()]
        return sum(sent[1:], sent[0]) if sent else None

    def state(self) -> dict[str, Tensor]:
        """Return this rank's error feedback as a byte tensor for a checkpoint; empty if there is none."""
        errors = {
            f"{stage}.{key}": value for stage, part in self._parts.items() for key, value in part.state_dict().items()
        }
        if not errors:
            return {}
        return {self._name: torch.frombuffer(bytearray(safetensors.torch.save(errors)), dtype=torch.uint8)}

    def restore(self, path: Path, manifest: Manifest) -> str:
        """Restore error feedback from the checkpoint at `path`; return the reason if it starts from zero, else ''."""
        if not self._parts or not self._has_feedback:
            return ""
        saved = manifest.run.get("comm")
        if saved is None or any(self.identity.get(key) != value for key, value in saved.items()):
            return f"error feedback starts from zero: the checkpoint {_difference(saved, self.identity)}"
        if self._name in save_load.tensor_names(path):
            packed = save_load.read_tensors(path, [self._name])[self._name]
            errors = safetensors.torch.load(packed.numpy().tobytes())
            for stage, part in self._parts.items():
                start = f"{stage}."
                part.load_state_dict({k.removeprefix(start): v for k, v in errors.items() if k.startswith(start)})
        return ""


class CountingSteps:
    """Context manager that counts the bytes of compressed collectives in training steps, excluding validation."""

    def __init__(self, compression: RunCompression) -> None:
        self._compression = compression
        self._before = sent = compression.sent()
        self._counted = None if sent is None else sent - sent

    def __enter__(self) -> None:
        self._before = self._compression.sent()

    def __exit__(self, *exception: object) -> None:
        sent = self._compression.sent()
        if sent is not None and self._before is not None and self._counted is not None:
            self._counted += sent - self._before

    def total(self) -> Traffic | None:
        """Return the total in the same form as the predicted traffic, or None without compression."""
        counted = self._counted
        if counted is None:
            return None
        sent = LinkBytes(counted.inside, counted.between)
        return Traffic(
            0, (TrafficEntry(Purpose.GRADIENTS, sent, LinkBytes(counted.exact_inside, counted.exact_between)),)
        )


def _nodes(plan: RunPlan) -> list[int] | None:
    """Return the node of each rank if the plan has several nodes, or None to group ranks by host."""
    nodes = [plan.mesh.node(rank) for rank in range(plan.mesh.num_ranks())]
    return nodes if len(set(nodes)) > 1 else None


def _unit_modules(part: StagePart) -> Iterator[tuple[str, Unit]]:
    """Yield name and unit of each module wrapped by FSDP2."""
    for kind, layer in part.plan.held(part.stage):
        for unit in kind.units:
            yield from ((kind.full_name(path, layer), unit) for path in unit.modules)
    yield "", part.stage.root


def _difference(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Describe how a checkpoint's layout differs from the current one."""
    if saved is None:
        return "has none"
    keys = sorted({**now, **saved}, key=lambda key: key == "layout")  # put the hash last: it explains least
    key = next(key for key in keys if saved.get(key) != now.get(key))
    return f"was saved with {key} = {saved.get(key)}, and this run has {now.get(key)}"
