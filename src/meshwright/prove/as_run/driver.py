"""Process entry points of a proof as run: the ranks of the layout, then the reference and the comparison."""

from __future__ import annotations

import json

import torch

from meshwright.comm.collective_timeout import name_failed_collective
from meshwright.config.facts_for_family import run_facts
from meshwright.mesh.process_groups import process_group
from meshwright.parallel.apply_plan import needs_mesh
from meshwright.prove.as_run.judge import judge
from meshwright.prove.as_run.record_run import AsRunRecord, record_as_run
from meshwright.prove.as_run.report import render, to_json
from meshwright.prove.spec import ProofSpec
from meshwright.train.launch.rank_context import RankContext


def record_layout(context: RankContext, spec: ProofSpec) -> None:
    """Train as one rank of the layout under proof and save its record in the spec's folder."""
    config, plan = spec.config, spec.plan
    group = process_group(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device=torch.device("cpu"),
        timeout_s=config.train.timeout_s,
        store_path=context.store_path,
        needed=needs_mesh(plan),
    )
    with group, name_failed_collective():
        data = config.family.open_data(run_facts(config))
        record = record_as_run(config, context, data, num_steps=spec.num_steps, plan=plan)
        torch.save(vars(record), spec.record(context.rank))


def compare_with_reference(context: RankContext, spec: ProofSpec) -> None:
    """Compute the reference, compare the ranks' records with it, and save the result in the same folder."""
    context.post("comparing")
    num_ranks = spec.config.mesh.axes().num_ranks()
    records = [AsRunRecord(**torch.load(spec.record(rank), weights_only=True)) for rank in range(num_ranks)]
    data = spec.config.family.open_data(run_facts(spec.config))
    result = judge(spec.config, spec.plan, records, data)
    answer = {"report": to_json(result, loss_unit=records[0].loss_unit), "lines": render(result)}
    spec.result.write_text(json.dumps(answer), "utf-8")
