"""Checks that a rank makes for itself where no launcher of ours has: of its plan, its memory and the run folder.

Ranks of the launcher on this machine's CPU don't import this."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack

import torch

from meshwright.capture.predict import predict_capture
from meshwright.cluster.host import host_memory_bytes
from meshwright.comm.collectives import all_gather_object, broadcast_object
from meshwright.comm.node_groups import host_identity, node_numbers
from meshwright.config.schema import CaptureConfig
from meshwright.errors import MeshwrightError
from meshwright.models.contract.family import TrainingData
from meshwright.optim.catalogue import BUILT_IN
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_process_memory
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.verify import verify
from meshwright.train.choose_folder import choose_folder
from meshwright.train.continued_run import naming
from meshwright.train.launch.machine_limits import check_memory
from meshwright.train.launch.rank_context import RankContext, RunSpec
from meshwright.train.record.reporter import reporting
from meshwright.train.record.run_measurement import memory_bytes
from meshwright.train.run_folder import RunFolder


def plan_before_group(spec: RunSpec, context: RankContext, device: torch.device) -> RunPlan:
    """Return the plan as far as it is known without other ranks, after checking its memory.

    Raises:
        LayoutError: the predicted memory far exceeds what is available.
    """
    plan = spec.plan or make_plan(spec.config)
    if device.type == "cuda":
        num_bytes = torch.cuda.get_device_properties(device).total_memory
        place = torch.cuda.get_device_name(device)
        check_memory(spec.config, plan, num_ranks=1, num_bytes=num_bytes, on_cpu=False, place=place, what="devices")
    else:
        ranks, memory = context.local_ranks, host_memory_bytes()
        check_memory(spec.config, plan, num_ranks=ranks, num_bytes=memory, on_cpu=True, place="this machine")
    return plan


def verified_plan(spec: RunSpec, context: RankContext) -> RunPlan:
    """Return the plan for the nodes that the ranks are on. Collective: all ranks must call it.

    Raises:
        LayoutError: the plan has faults.
    """
    plan = spec.plan or make_plan(spec.config, nodes=shared_nodes(context.num_ranks))
    verify(plan)
    return plan


def predicted_bytes(plan: RunPlan, capture: CaptureConfig, device: torch.device) -> int:
    """Return the memory of a rank: of its process on a CPU; on a GPU, what PyTorch holds already is measured."""
    if device.type == "cpu":
        return predict_process_memory(plan)
    graphs = predict_capture(plan, mode=capture.mode).added() if capture.scope == ("layer",) else 0
    return memory_bytes(device) + predict_cuda_memory(plan).total() + graphs


def shared_nodes(num_ranks: int) -> int | tuple[int, ...] | None:
    """Return the mapping of ranks to nodes in plan format: consecutive ranks per node, or the node of each rank.

    Return None for a single rank. Collective: all ranks must call it.
    """
    if num_ranks == 1:
        return None
    nodes = tuple(node_numbers(all_gather_object(host_identity())))
    sizes = set(Counter(nodes).values())
    size = next(iter(sizes))
    is_even = len(sizes) == 1 and all(node == rank // size for rank, node in enumerate(nodes))
    return size if is_even else nodes


def agree_on_folder(
    context: RankContext, spec: RunSpec, plan: RunPlan, corpus: TrainingData, hold: ExitStack
) -> RunFolder:
    """Let rank 0 choose and lock the folder, and share it with all ranks; an error on rank 0 ends all of them.

    Reports and errors about the folder are open until `hold` closes.
    """
    if plan.optimizer.name not in BUILT_IN:
        from meshwright.train.own_optimizer import check_optimizer

        check_optimizer(plan)
    choice: RunFolder | MeshwrightError | None = None
    if context.rank == 0:
        try:
            if spec.config.train.trackers:
                from meshwright.train.record.trackers import check_trackers

                check_trackers(spec.config.train.trackers)
            choice = choose_folder(spec.config, out=spec.out, resume=spec.resume, corpus=corpus.fingerprint, hold=hold)
        except MeshwrightError as error:
            choice = error
    choice = broadcast_object(choice)
    if isinstance(choice, MeshwrightError):
        if context.rank != 0:
            sys.exit(choice.exit_code)  # rank 0 reports the error
        raise choice
    assert choice is not None
    hold.enter_context(reporting(choice.path) if context.rank == 0 else naming(choice.path))
    return choice
