"""Process entry points of a proof: the ranks of the layout, then the reference and the comparison.

Both write to a folder read by `api.prove`; tensors are loaded with `weights_only=True`. A failed proof of a plan is
compared with references with known faults, and with contributions of token shards.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.compare.conclude import compare
from meshwright.prove.compare.result import ProofResult
from meshwright.prove.locate.conclude import find_place, step_to_locate, with_place
from meshwright.prove.locate.layout_pass import RankPass, record_activations
from meshwright.prove.placement import context_placement_of, expert_placement_of, stage_placement_of
from meshwright.prove.record.context_variants import ContextVariants
from meshwright.prove.record.evidence import ContextEvidence, Variant, Variants
from meshwright.prove.record.expert_variants import ExpertVariants
from meshwright.prove.record.layout_run import RankRecord, gather_evidence, record_rank
from meshwright.prove.record.optimizer_variants import OptimizerVariants
from meshwright.prove.record.reference_run import compute_reference
from meshwright.prove.record.token_contributions import token_contributions
from meshwright.prove.report import render, to_json
from meshwright.prove.spec import ProofSpec
from meshwright.prove.untaken_paths.diagnose_branches import diagnose_branches, unproved
from meshwright.train.build_job import rank_group
from meshwright.train.launch.rank_context import RankContext


def record_layout(context: RankContext, spec: ProofSpec) -> None:
    """Train as one rank of the layout under proof and save its record in the spec's folder."""
    config = spec.config
    with rank_group(spec.config, spec.plan, context, torch.device("cpu")):
        corpus = config.family.open_data(run_facts(config))
        record = record_rank(config, context, corpus, num_steps=spec.num_steps, plan=spec.plan)
        torch.save(vars(record), spec.record(context.rank))


def compare_with_reference(context: RankContext, spec: ProofSpec) -> None:
    """Compute the reference, compare the ranks' records with it, and save the result in the same folder.

    If a forward goes wrong for an unknown reason, `step_to_locate` is the step for which a second pass is worthwhile.
    """
    context.post("comparing")
    num_ranks = spec.config.mesh.axes().num_ranks()
    records = [RankRecord(**torch.load(spec.record(rank), weights_only=True)) for rank in range(num_ranks)]
    result = conclude(spec.config, records, num_steps=spec.num_steps, plan=spec.plan)
    _save(spec, result, loss_unit=records[0].loss_unit)


def locate_on_ranks(context: RankContext, spec: ProofSpec) -> None:
    """Train as one rank again, up to the step in which the forward goes wrong, and save its activations."""
    config, plan = spec.config, spec.plan
    with rank_group(spec.config, spec.plan, context, torch.device("cpu")):
        corpus = config.family.open_data(run_facts(config))
        found = record_activations(config, context, corpus, step=spec.step_to_locate(), plan=plan)
        torch.save(vars(found), spec.activations(context.rank))


def locate_with_reference(context: RankContext, spec: ProofSpec) -> None:
    """Compare the ranks' activations with the reference, and add the place of the fault to the saved result."""
    context.post("comparing")
    config, plan = spec.config, spec.plan
    num_ranks = config.mesh.axes().num_ranks()
    ranks = [RankPass(**torch.load(spec.activations(rank), weights_only=True)) for rank in range(num_ranks)]
    data = config.family.open_data(run_facts(config))
    place = find_place(config, data, plan, ranks, step=spec.step_to_locate())
    result, loss_unit = pickle.loads(spec.findings.read_bytes())
    _save(spec, with_place(result, place), loss_unit=loss_unit)


def _save(spec: ProofSpec, result: ProofResult, *, loss_unit: str) -> None:
    spec.findings.write_bytes(pickle.dumps((result, loss_unit)))
    answer = {
        "report": to_json(result, loss_unit=loss_unit),
        "lines": render(result),
        "step_to_locate": step_to_locate(result),
    }
    spec.result.write_text(json.dumps(answer), "utf-8")


def conclude(
    config: RunConfig, records: list[RankRecord], *, num_steps: int, plan: RunPlan | None = None
) -> ProofResult:
    """Compare the records of all ranks with the reference."""
    plan = plan or make_plan(config)
    data = config.family.open_data(run_facts(config))
    reference = compute_reference(config, data, num_steps=num_steps, stages=stage_placement_of(plan))
    layout = gather_evidence(config, records, plan=plan)
    result = compare(
        layout,
        reference,
        variants=known_variants(config, data, plan, num_steps=num_steps),
        by_context=context_contributions(config, data, plan),
        branches=diagnose_branches(config, data, layout),
    )
    return replace(result, notes=(*result.notes, *unproved(config, data, reference)))


class KnownVariants:
    """Variants of several parts of a model."""

    def __init__(self, parts: Sequence[Variants]) -> None:
        self._parts = parts

    def of_first_step(self) -> Iterator[Variant]:
        """Yield the variants of all parts that differ in step 1."""
        return (variant for part in self._parts for variant in part.of_first_step())

    def of_later_steps(self) -> Iterator[Variant]:
        """Yield the variants of all parts that differ from step 2 on."""
        return (variant for part in self._parts for variant in part.of_later_steps())


def known_variants(config: RunConfig, data: TrainingData, plan: RunPlan, *, num_steps: int) -> Variants:
    """Return the faulty references for a plan."""
    context, experts = context_placement_of(plan, config.mesh.axes()), expert_placement_of(plan)
    parts: list[Variants] = []
    if context is not None:
        parts.append(ContextVariants(config, data, context))
    # Under cp, ranks of ep share samples, so no fault of theirs is one of whole data-parallel ranks.
    if experts is not None and (context is None or experts.size == 1):
        parts.append(ExpertVariants(config, data, experts, num_steps=num_steps))
    return KnownVariants([*parts, OptimizerVariants(config, data, num_steps=num_steps)])


def context_contributions(config: RunConfig, data: TrainingData, plan: RunPlan) -> Callable[[], ContextEvidence] | None:
    """Return what computes the contributions of context-parallel ranks, or None without any."""
    placement = context_placement_of(plan, config.mesh.axes())
    return None if placement is None else partial(token_contributions, config, data, placement)
