"""Summation of shared gradients on real ranks: the embedders of a diffusion transformer, sharded and full.

The stages are those of the model without its blocks. As in a real model, only one stage has the patch embedding and
only one has the final layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.comm.collectives import all_gather_object
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import RunError
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.mesh.process_groups import process_group
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import Part
from meshwright.nn.weight_init import normal_shard
from meshwright.parallel.pipeline_shared_gradients import SharedGradients, pipelines_on
from meshwright.pipeline.split_layers import SharedParameter
from meshwright.train.build_job import initialize
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Timer, Work, alternate
from meshwright_bench.byte_counters import SentBytes
from meshwright_bench.shared_gradients.cases import FULL, PP, SHARDED, SyncTask
from meshwright_bench.train.measure import timer_on

CPU = torch.device("cpu")


class SumSide:
    """Side of the comparison: the stage on this rank, its gradients and their sum over stages."""

    def __init__(self, config: RunConfig, mesh: DeviceMesh, *, sharded: bool) -> None:
        self._stage = mesh.get_local_rank("pp")
        part = Part(range(0), stage=self._stage, num_stages=PP)
        f = run_facts(config)
        module = build_part(config.family, f, dtype=torch.float32, part=part)
        if sharded:
            fully_shard(module, mesh=mesh["dp_shard"])
        module.to_empty(device=CPU)
        initialize(module.named_parameters(), config.family, f)
        keys = sorted(p.name for kind in model_facts(config).every for p in kind.parameters)
        declared = [SharedParameter(key, tuple((stage, key) for stage in range(PP))) for key in keys]
        self.sum = SharedGradients(declared, {self._stage: module}, pipelines=pipelines_on(mesh)).sync_all
        self._parameters: dict[str, nn.Parameter] = {p.key: module.get_parameter(p.key) for p in declared}
        self._stage_gradients = {key: self._gradient_shard(key, self._stage) for key in self._parameters}

    def fill(self) -> None:
        """Set the gradients of this stage as its backward would."""
        for key, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            to_local(parameter.grad).copy_(self._stage_gradients[key])

    def incorrect_parameters(self) -> list[str]:
        """Return the parameters whose gradient is not, bitwise, the sum of the stages' gradients."""
        gradients = {
            key: to_local(parameter.grad) for key, parameter in self._parameters.items() if parameter.grad is not None
        }
        return [
            key
            for key in self._parameters
            if not torch.equal(gradients[key], self._gradient_shard(key, 0) + self._gradient_shard(key, 1))
        ]

    def _gradient_shard(self, key: str, stage: int) -> Tensor:
        """Return this rank's shard of a stage's gradient, which depends on stage and name only."""
        parameter = self._parameters[key]
        return normal_shard(stage, key, parameter.shape, std=1.0, index=local_box(parameter).slices()).float()


def measure_sync(context: RankContext, task: SyncTask) -> None:
    """Measure both sides; rank 0 writes bytes and seconds as JSON."""
    with process_group(
        rank=context.rank, num_ranks=context.num_ranks, device=CPU, timeout_s=120, store_path=context.store_path
    ):
        answer = both_sides(task)
    if context.rank == 0:
        task.result.write_text(json.dumps(answer), "utf-8")


def both_sides(task: SyncTask) -> dict[str, Any]:
    """Measure each side's bytes (maximum over ranks) and seconds per round. Must be called on all ranks."""
    mesh = init_device_mesh("cpu", (PP, task.dp_shard), mesh_dim_names=("pp", "dp_shard"))
    sides = {name: SumSide(task.config, mesh, sharded=name == SHARDED) for name in (SHARDED, FULL)}
    num_bytes = {name: max(all_gather_object(_checked_bytes(name, side))) for name, side in sides.items()}
    timer = partial(_fill_and_time, timer_on(CPU), sides.values())
    arms: dict[str, Callable[[], object]] = {name: side.sum for name, side in sides.items()}
    timed = alternate(arms, timer=timer, rounds=task.rounds, steps=task.steps)
    return {"bytes": num_bytes, "seconds": timed.seconds}


def _checked_bytes(name: str, side: SumSide) -> int:
    """Return the bytes that this rank sends for one sum, after checking the result."""
    side.fill()
    sent = SentBytes()
    with sent:
        side.sum()
    if incorrect := side.incorrect_parameters():
        raise RunError(
            f"incorrect sum of {name} gradients for {', '.join(incorrect)}",
            where="bench shared-gradients",
            rule="both sides must equal the sum of the stages' gradients bitwise, else the comparison is meaningless",
            fix="this is a bug: please report it with this message",
        )
    return sent.total


def _fill_and_time(timer: Timer, sides: Any, work: Work) -> float:
    """Time a block after resetting the gradients, since repeated sums would overflow."""
    for side in sides:
        side.fill()
    return timer(work)
