"""Run one rank under any launcher: process group, data, consistency checks, job and training loop."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack

import torch

from meshwright.cluster.host import host_memory_bytes
from meshwright.comm.collectives import all_gather_object, broadcast_object
from meshwright.comm.node_groups import host_identity, node_numbers
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.overlay import flatten
from meshwright.config.schema import RunConfig
from meshwright.errors import DataError, LayoutError, MeshwrightError
from meshwright.log import open_log_file
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Task
from meshwright.optim.catalogue import BUILT_IN
from meshwright.plan.compare import differences, hashes
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_memory, predict_process_memory
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import from_json, to_json
from meshwright.plan.traffic import predict_traffic
from meshwright.plan.verify import verify
from meshwright.train.build_job import build_job, choose_device, rank_group
from meshwright.train.continued_run import naming
from meshwright.train.launch.machine_limits import check_memory
from meshwright.train.launch.rank_context import RankContext, RunSpec
from meshwright.train.measure.run_measurement import memory_bytes
from meshwright.train.record.events import RecordingReporter, reporting
from meshwright.train.record.record_files import EventLog
from meshwright.train.record.reporter import Reporter, Start
from meshwright.train.run_folder import RunFolder, choose_folder
from meshwright.train.training_loop import Trainer

CORPUS = "corpus"


def run_rank(context: RankContext, spec: RunSpec) -> None:
    """Train as this rank.

    Raises:
        MeshwrightError: the run failed for a reason that the user can fix; any other exception is a bug.
    """
    config = spec.config
    if spec.folder is not None:
        open_log_file(spec.folder.log(context.rank))
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    plan = spec.plan or make_plan(config)
    context.board.describe(plan.describe_action)  # for errors under another launcher, which doesn't have the table
    device = choose_device(config, context)
    _check_memory(config, plan, context, device)
    with rank_group(config, plan, context, device), ExitStack() as hold:
        f = run_facts(config)
        corpus = config.family.open_data(f)
        check_agreement(config, corpus)
        plan = spec.plan or make_plan(config, nodes=shared_nodes(context.num_ranks))
        verify(plan)
        agree_on_plan(plan)
        if spec.folder is None and plan.optimizer.name not in BUILT_IN:  # the launcher has done it, if it is ours
            from meshwright.train.own_optimizer import check_optimizer

            check_optimizer(plan)
        folder = spec.folder or _agree_on_folder(context, spec, corpus, hold)
        open_log_file(folder.log(context.rank))
        if spec.folder is None:  # or the launcher does it, which chose the folder
            hold.enter_context(reporting(folder.path) if context.rank == 0 else naming(folder.path))
        reporter = Reporter()
        if context.rank == 0:
            reporter = RecordingReporter(spec.make_reporter(), EventLog(folder.path), done=folder.done())
        task = config.family.task(f, corpus, device)
        reporter.started(_start(config, plan, corpus, task, device, folder))
        for note in (*context.notes, *spec.notes):
            reporter.note(note)
        base_bytes = memory_bytes(device)
        job = build_job(config, plan, context, device)
        Trainer(job, task, corpus.fingerprint, folder, reporter, base_bytes=base_bytes).run()


def _check_memory(config: RunConfig, plan: RunPlan, context: RankContext, device: torch.device) -> None:
    if device.type == "cuda":
        num_bytes = torch.cuda.get_device_properties(device).total_memory
        place = torch.cuda.get_device_name(device)
        check_memory(config, plan, num_ranks=1, num_bytes=num_bytes, on_cpu=False, place=place, what="devices")
    else:
        ranks, memory = context.local_ranks, host_memory_bytes()
        check_memory(config, plan, num_ranks=ranks, num_bytes=memory, on_cpu=True, place="this machine")


def _start(
    config: RunConfig,
    plan: RunPlan,
    corpus: TrainingData,
    task: Task,
    device: torch.device,
    folder: RunFolder,
) -> Start:
    axes, tensors = config.mesh.axes(), predict_memory(plan).total()
    return Start(
        name=config.name,
        num_params=model_facts(config).num_params(),
        corpus=corpus.description,
        mesh=config.mesh.layout(),
        num_ranks=axes.num_ranks(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        backend=None if axes.num_ranks() == 1 else "nccl" if device.type == "cuda" else "gloo",
        global_batch=config.train.global_batch,
        seq_len=plan.batch.tokens,
        steps=config.train.steps,
        # On a GPU, what PyTorch holds already is measured; the rest is predicted.
        predicted_bytes=predict_process_memory(plan) if device.type == "cpu" else memory_bytes(device) + tensors,
        traffic=predict_traffic(plan),
        folder=folder.path,
        unit=task.unit,
    )


def _agree_on_folder(context: RankContext, spec: RunSpec, corpus: TrainingData, hold: ExitStack) -> RunFolder:
    """Let rank 0 choose and lock the folder, and share it with all ranks; an error on rank 0 ends all of them."""
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
    return choice


def check_agreement(config: RunConfig, corpus: TrainingData) -> None:
    """Check that configuration and data, which may differ between nodes, are the same on all ranks.

    Raises:
        DataError: two ranks differ; the message names the first differing key and both values.
    """
    source = ", ".join(config.data.mixture or [config.data.source])
    by_rank = all_gather_object({**flatten(config.model_dump()), CORPUS: corpus.fingerprint})
    for rank, keys in enumerate(by_rank):
        for name in sorted(keys.keys() | by_rank[0].keys()):
            first, other = (known.get(name, "not set") for known in (by_rank[0], keys))
            if first != other:
                values = "" if name == CORPUS else f": {first} and {other}"
                raise DataError(
                    f"ranks 0 and {rank} have different values of {name}{values}",
                    where=source if name == CORPUS else f"command line, {name}",
                    rule="every rank trains on the same corpus with the same configuration",
                    fix="the same Python version, libraries, files and command line on every node",
                )


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


def agree_on_plan(plan: RunPlan) -> None:
    """Check that all ranks have the same plan. Collective: all ranks must call it.

    Raises:
        LayoutError: two plans differ; raised on all ranks, naming the first field that differs.
    """
    fingerprints = all_gather_object(hashes(plan).fingerprint)
    other = next((rank for rank, one in enumerate(fingerprints) if one != fingerprints[0]), None)
    if other is None:
        return
    texts = all_gather_object(to_json(plan))
    first, second = (from_json(texts[rank], where=f"the plan of rank {rank}") for rank in (0, other))
    difference = differences(first, second)[0]
    raise LayoutError(
        f"ranks 0 and {other} have different plans: {difference}",
        where=f"rank {other}, {difference.path}",
        rule="all ranks run the same plan",
        fix="the same configuration, plan file, schedule file and version of Meshwright on every node",
    )
