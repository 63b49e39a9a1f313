"""Proofs as run on the gang's ranks: what `meshwright prove --as-run` does, without starting processes."""

from __future__ import annotations

import importlib
from functools import partialmethod

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from meshwright.config.schema import RunConfig
from meshwright.data.images import ImageDataset
from meshwright.parallel import context_attention, data_parallel, tensor_parallel
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.prove.as_run.configuration import as_configured, num_steps
from meshwright.prove.as_run.judge import judge
from meshwright.prove.as_run.record_run import AsRunRecord, record_as_run
from meshwright.prove.as_run.result import AsRunResult
from meshwright.train import optimizer, pipeline_stages, train_step
from tests.gangs.gang import GangPool
from tests.helpers import open_data, rank_context
from tests.prove.proofs import SMALL, SMALL_DIT, SMALL_EXPERTS, SMALL_PICTURES, SOURCE, few_pictures, restored

SIZES = {
    "llama-tiny": (*SMALL, f"data.source={SOURCE}"),
    "moe-tiny": (*SMALL_EXPERTS, f"data.source={SOURCE}"),
    "dit-digits": (*SMALL_DIT, *SMALL_PICTURES),
}


REPLACED = (
    train_step, pipeline_stages, optimizer, tensor_parallel, data_parallel, context_attention,
    context_attention.RingAttention, dist, FSDPParam, nn.Module,
)  # fmt: skip


def as_run_config(*words: str, preset: str = "llama-tiny", precision: str = "bfloat16") -> RunConfig:
    """A small model of a preset, in bfloat16."""
    return as_configured(load(preset, [*SIZES[preset], f"train.precision={precision}", *words]))


def record_on_rank(
    rank: int,
    world_size: int,
    config: RunConfig,
    fault: str = "",
    steps: int | None = None,
    data: ImageDataset | None = None,
) -> AsRunRecord:
    """Gang body: train as this rank, with the fault of that name seeded.

    Beside others a rank runs the graphs of compiled blocks as they are: Inductor would take most of a minute.
    """
    faults = importlib.import_module("tests.prove.as_run.faults")
    tamper = faults.FAULTS[fault].tamper if fault else None
    context = rank_context(rank, world_size)
    plan = make_plan(config)
    with restored(*REPLACED):
        if world_size > 1:
            nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")  # type: ignore[assignment]
        faults.BEFORE.get(fault, lambda: None)()
        steps = steps or num_steps(plan, None)
        return record_as_run(config, context, data or open_data(config), num_steps=steps, plan=plan, tamper=tamper)


def proof(gang: GangPool, config: RunConfig, fault: str = "", *, steps: int | None = None) -> AsRunResult:
    """The proof of a configuration on a gang, with a fault where one is named."""
    world_size, pictures = config.mesh.axes().num_ranks(), few_pictures(config)
    records = gang(world_size).run(record_on_rank, config, fault, steps, pictures, timeout_s=300)
    return judge(config, make_plan(config), records, pictures or open_data(config))
