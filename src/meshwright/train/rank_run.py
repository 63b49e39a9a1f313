"""Run one rank under any launcher: process group, data, consistency checks, job and training loop."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from meshwright.comm.collectives import all_gather_object
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.overlay import flatten
from meshwright.config.schema import RunConfig
from meshwright.errors import DataError, LayoutError
from meshwright.log import open_log_file
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Task
from meshwright.plan.compare import differences, hashes
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import from_json, to_json
from meshwright.plan.traffic import predict_traffic
from meshwright.train.build_job import build_job, choose_device, rank_group
from meshwright.train.launch.rank_context import DATA, GROUP, PROCESSES, RankContext, RunSpec
from meshwright.train.record.record_files import EventLog
from meshwright.train.record.reporter import RecordingReporter, Reporter, Start
from meshwright.train.record.run_measurement import memory_bytes
from meshwright.train.run_folder import RunFolder
from meshwright.train.training_loop import Trainer

CORPUS = "corpus"


def run_rank(context: RankContext, spec: RunSpec) -> None:
    """Train as this rank.

    Raises:
        MeshwrightError: the run failed for a reason that the user can fix; any other exception is a bug.
    """
    config, start = spec.config, spec.start
    start.end(PROCESSES)
    if spec.folder is not None:
        open_log_file(spec.folder.log(context.rank))
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    device = choose_device(config, context)
    # The launcher has checked the CPU's memory; it can't know of every GPU.
    plan, process_bytes = spec.plan, None if device.type == "cuda" else spec.process_bytes
    if plan is None or process_bytes is None:
        from meshwright.train.rank_checks import plan_before_group

        plan = plan_before_group(spec, context, device)
    context.board.describe(plan.describe_action)  # for errors under another launcher, which doesn't have the table
    with rank_group(config, plan, context, device), ExitStack() as hold:
        start.end(GROUP)
        f = run_facts(config)
        corpus = config.family.open_data(f)
        check_agreement(config, corpus)
        if process_bytes is None:
            from meshwright.train.rank_checks import verified_plan

            plan = verified_plan(spec, context)
        agree_on_plan(plan)
        folder = spec.folder
        if folder is None:
            from meshwright.train.rank_checks import agree_on_folder

            folder = agree_on_folder(context, spec, plan, corpus, hold)
        open_log_file(folder.log(context.rank))
        reporter = Reporter()
        if context.rank == 0:
            reporter = RecordingReporter(spec.make_reporter(), EventLog(folder.path), done=folder.done())
        task = config.family.task(f, corpus, device)
        reporter.started(_start(config, plan, corpus, task, device, folder, process_bytes))
        for note in (*context.notes, *spec.notes):
            reporter.note(note)
        base_bytes = memory_bytes(device)
        start.end(DATA)
        job = build_job(config, plan, context, device, start)
        Trainer(
            job, task, corpus.fingerprint, folder, reporter, base_bytes=base_bytes, plan_given=spec.plan_given
        ).run()


def _start(
    config: RunConfig,
    plan: RunPlan,
    corpus: TrainingData,
    task: Task,
    device: torch.device,
    folder: RunFolder,
    process_bytes: int | None,
) -> Start:
    axes = config.mesh.axes()
    if process_bytes is None:
        from meshwright.train.rank_checks import predicted_bytes

        process_bytes = predicted_bytes(plan, config.capture, device)
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
        predicted_bytes=process_bytes,
        traffic=predict_traffic(plan),
        folder=folder.path,
        unit=task.unit,
    )


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
