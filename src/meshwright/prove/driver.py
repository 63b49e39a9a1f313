"""Process entry points of a proof: the ranks of the layout, then the reference and the comparison.

Both write to a folder read by `api.prove`; tensors are loaded with `weights_only=True`.
"""

from __future__ import annotations

import json

import torch

from meshwright.comm.collective_timeout import name_failed_collective
from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.mesh.process_groups import process_group
from meshwright.parallel.apply_plan import needs_mesh
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import ProofResult
from meshwright.prove.record.known_variants import context_contributions, known_variants
from meshwright.prove.record.layout_run import RankRecord, gather_evidence, record_rank
from meshwright.prove.record.reference_run import compute_reference
from meshwright.prove.report import render, to_json
from meshwright.prove.spec import ProofSpec
from meshwright.prove.stage_placement import stage_placement_of
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
        corpus = config.family.open_data(run_facts(config))
        record = record_rank(config, context, corpus, num_steps=spec.num_steps, plan=plan)
        torch.save(vars(record), spec.record(context.rank))


def compare_with_reference(context: RankContext, spec: ProofSpec) -> None:
    """Compute the reference, compare the ranks' records with it, and save the result in the same folder."""
    context.post("comparing")
    num_ranks = spec.config.mesh.axes().num_ranks()
    records = [RankRecord(**torch.load(spec.record(rank), weights_only=True)) for rank in range(num_ranks)]
    result = conclude(spec.config, records, num_steps=spec.num_steps, plan=spec.plan)
    answer = {"report": to_json(result, loss_unit=records[0].loss_unit), "lines": render(result)}
    spec.result.write_text(json.dumps(answer), "utf-8")


def conclude(
    config: RunConfig, records: list[RankRecord], *, num_steps: int, plan: RunPlan | None = None
) -> ProofResult:
    """Compare the records of all ranks with the reference."""
    plan = plan or make_plan(config)
    data = config.family.open_data(run_facts(config))
    reference = compute_reference(config, data, num_steps=num_steps, stages=stage_placement_of(plan))
    return compare(
        gather_evidence(config, records, plan=plan),
        reference,
        variants=known_variants(config, data, plan, num_steps=num_steps),
        by_context=context_contributions(config, data, plan),
    )
