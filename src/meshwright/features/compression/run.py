"""Compressed gradients and weights in a run, with error feedback kept across steps and checkpoints.

A rank's error feedback belongs to the shards this rank sends and is useless on another layout. A checkpoint therefore
holds one byte tensor per rank, regardless of the number of modules, and records its layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from meshwright.checkpoint import save_load
from meshwright.checkpoint.manifest import Manifest
from meshwright.comm.compression.catalogue import EXACT, find_method
from meshwright.comm.compression.fsdp_collectives import SentBytes
from meshwright.comm.compression.fsdp_compress import Replicas, compress
from meshwright.comm.node_groups import place
from meshwright.config.schema import MeshConfig
from meshwright.features.contract import OnRank, RunFeature
from meshwright.parallel.rank_model import StagePart
from meshwright.plan.compare import hashes
from meshwright.plan.run_plan import RunPlan, Unit
from meshwright.plan.traffic import LinkBytes, Purpose, Traffic, TrafficEntry
from meshwright.train.build_job import Job


class CompressionOnRank(OnRank):
    """Compressed collectives of this rank's stages."""

    saved_as = "comm"

    def __init__(self, job: Job) -> None:
        config, plan, mesh = job.config, job.plan, job.mesh
        assert mesh is not None, "ranks that send gradients have a mesh"
        self._name = f"comm.rank{job.context.rank}"
        gradients = sorted({unit.gradients for stage in plan.stages for unit in plan.units(stage)})
        self._has_feedback = any(find_method(name).feedback for name in gradients)
        parts = job.parts()
        placement = place(
            [part.module for part in parts.values()], nodes=_nodes(plan), timeout_s=config.train.timeout_s
        )
        self.identity = {
            "gradients": gradients[0] if len(gradients) == 1 else gradients,
            "mesh": list(config.mesh.axes().sizes()),
            "layers_per_stage": [len(stage.kinds) for stage in plan.stages],
            "freeze": list(config.train.freeze),
            "layout": hashes(plan).layout,
            "nodes": list(placement.nodes),
        }
        """Identity of the error feedback: errors are interchangeable only if it is equal. The plan's hash suffices;
        the other keys explain a mismatch to the user and are all that checkpoints predating plans have."""
        replicas = Replicas(mesh.get_group("dp_replicate"), sums=True) if plan.mesh.view("replicas") else None
        self._parts = {}
        for number, part in parts.items():
            by_module = dict(_unit_modules(part))
            self._parts[number] = compress(
                part.module,
                gradients={name: unit.gradients for name, unit in by_module.items()},
                weights={name: unit.weights for name, unit in by_module.items()},
                inside_node={name: unit.inside_node for name, unit in by_module.items()},
                placement=placement,
                replicas=replicas,
            )
        self._counted = SentBytes()

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = self._sent()
        yield
        self._counted += self._sent() - before

    def end_step(self, *, applied: bool) -> None:
        """Keep the step's error feedback if the optimizer took the step, otherwise discard it."""
        for part in self._parts.values():
            if applied:
                part.commit()
            else:
                part.discard()

    def state(self) -> dict[str, Tensor]:
        """Return this rank's error feedback as a byte tensor for a checkpoint; empty if there is none."""
        errors = {
            f"{stage}.{key}": value for stage, part in self._parts.items() for key, value in part.state_dict().items()
        }
        if not errors:
            return {}
        return {self._name: torch.frombuffer(bytearray(safetensors.torch.save(errors)), dtype=torch.uint8)}

    def restore(self, path: Path, manifest: Manifest) -> str:
        """Restore what this rank saved in the checkpoint at `path`; return the reason if error feedback starts from
        zero, else ''."""
        saved = manifest.run.get(self.saved_as)
        if saved is None or any(self.identity.get(key) != value for key, value in saved.items()):
            if not self._has_feedback:
                return ""
            found = saved or _without_compression(manifest)
            return f"error feedback starts from zero: the checkpoint {_difference(found, self.identity)}"
        if self._name in save_load.tensor_names(path):
            packed = save_load.read_tensors(path, [self._name])[self._name]
            errors = safetensors.torch.load(packed.numpy().tobytes())
            for stage, part in self._parts.items():
                start = f"{stage}."
                part.load_state_dict({k.removeprefix(start): v for k, v in errors.items() if k.startswith(start)})
        return ""

    def sent(self) -> LinkBytes:
        sent = self._sent()
        return LinkBytes(sent.inside, sent.between)

    def traffic(self) -> Traffic:
        counted = self._counted
        sent, exact = (
            LinkBytes(counted.inside, counted.between),
            LinkBytes(counted.exact_inside, counted.exact_between),
        )
        return Traffic(0, (TrafficEntry(Purpose.GRADIENTS, sent, exact),))

    def _sent(self) -> SentBytes:
        """Return the gradient and weight bytes sent by this rank, also in validations."""
        return sum((part.sent() for part in self._parts.values()), SentBytes())


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


def _without_compression(manifest: Manifest) -> dict[str, Any]:
    """Return what is known of a checkpoint whose run compressed nothing, or had nothing to send."""
    config = manifest.run.get("config")
    if config is None:
        return {}
    mesh = MeshConfig.model_validate(config["mesh"]).axes()
    return {"gradients": config.get("comm", {}).get("gradients", EXACT), "mesh": list(mesh.sizes())}


def _difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how a checkpoint's layout differs from the current one."""
    if all(now.get(key) == value for key, value in saved.items()):
        return "has none"
    keys = sorted({**now, **saved}, key=lambda key: key == "layout")  # put the hash last: it explains least
    key = next(key for key in keys if saved.get(key) != now.get(key))
    return f"was saved with {key} = {saved.get(key)}, and this run has {now.get(key)}"


class CompressionInRuns(RunFeature):
    def start(self, job: Job) -> OnRank:
        return CompressionOnRank(job)


FEATURE = CompressionInRuns()
