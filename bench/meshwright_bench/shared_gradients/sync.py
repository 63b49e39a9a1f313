"""The sum of shared gradients on real ranks: the embedders of a diffusion transformer, sharded and whole.

The stages are those of the model without its blocks. What only one of them has (patch embedding, final layer) makes
them differ, as the stages of a real model do.
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
from meshwright.parallel.sync_shared_gradients import SharedGradients, pipelines_on
from meshwright.pipeline.shared_parameters import SharedParameter
from meshwright.train.build_job import initialize
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.alternate import Timer, Work, alternate
from meshwright_bench.byte_counters import SentBytes
from meshwright_bench.shared_gradients.cases import PP, SHARDED, WHOLE, SyncTask
from meshwright_bench.train.measure import timer_on

CPU = torch.device("cpu")


class Side:
    """One way of adding up: a stage on this rank, its gradients, the sum."""

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
        self._own = {key: self._piece(key, self._stage) for key in self._parameters}

    def fill(self) -> None:
        """Set the gradients of this stage, as its backward leaves them."""
        for key, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            to_local(parameter.grad).copy_(self._own[key])

    def wrong(self) -> list[str]:
        """The parameters whose gradient isn't, bitwise, the sum of the stages' gradients."""
        found = {
            key: to_local(parameter.grad) for key, parameter in self._parameters.items() if parameter.grad is not None
        }
        return [
            key for key in self._parameters if not torch.equal(found[key], self._piece(key, 0) + self._piece(key, 1))
        ]

    def _piece(self, key: str, stage: int) -> Tensor:
        """What this rank holds of a stage's gradient; it depends on stage and name alone."""
        parameter = self._parameters[key]
        return normal_shard(stage, key, parameter.shape, std=1.0, index=local_box(parameter).slices()).float()


def measure_sync(context: RankContext, task: SyncTask) -> None:
    """Measure both sides; rank 0 writes bytes and seconds as JSON."""
    with process_group(
        rank=context.rank, num_ranks=context.num_ranks, device=CPU, timeout_s=120, store_path=context.store_path
    ):
        found = both_sides(task)
    if context.rank == 0:
        task.result.write_text(json.dumps(found), "utf-8")


def both_sides(task: SyncTask) -> dict[str, Any]:
    """Bytes, the most of all ranks, and seconds by round, of each side. All ranks call it together."""
    mesh = init_device_mesh("cpu", (PP, task.dp_shard), mesh_dim_names=("pp", "dp_shard"))
    sides = {name: Side(task.config, mesh, sharded=name == SHARDED) for name in (SHARDED, WHOLE)}
    num_bytes = {name: max(all_gather_object(_checked_bytes(name, side))) for name, side in sides.items()}
    timer = partial(_filled_first, timer_on(CPU), sides.values())
    arms: dict[str, Callable[[], object]] = {name: side.sum for name, side in sides.items()}
    timed = alternate(arms, timer=timer, rounds=task.rounds, steps=task.steps)
    return {"bytes": num_bytes, "seconds": timed.seconds}


def _checked_bytes(name: str, side: Side) -> int:
    """What this rank sends in one sum, which is seen to be right."""
    side.fill()
    sent = SentBytes()
    with sent:
        side.sum()
    if wrong := side.wrong():
        raise RunError(
            f"the sum of {name} gradients is wrong for {', '.join(wrong)}",
            where="bench shared-gradients",
            rule="both sides give the sum of the stages' gradients, bitwise: figures of different work mean nothing",
            fix="none from outside: it is a bug; please report it with this message",
        )
    return sent.total


def _filled_first(timer: Timer, sides: Any, work: Work) -> float:
    """Time a block that starts from the stages' own gradients: sums of sums would overflow in the end."""
    for side in sides:
        side.fill()
    return timer(work)
