"""The two parts of a proof as processes: the layout's ranks, then the reference with the comparison.

Both write into a folder that `cli/prove` reads; tensors travel as safe files, never as pickled code.
"""

from __future__ import annotations

import json

import torch

from meshwright.comm.hang import naming_collectives
from meshwright.config.schema import RunConfig
from meshwright.mesh.groups import process_group
from meshwright.prove.compare import compare
from meshwright.prove.record import RankRecord, gather_evidence, record_rank
from meshwright.prove.reference import compute_reference
from meshwright.prove.report import render, to_json
from meshwright.prove.result import ProofResult
from meshwright.prove.spec import ProofSpec
from meshwright.train.build import layout_needs_mesh
from meshwright.train.context import RankContext
from meshwright.train.corpus import open_training_data


def record_layout(context: RankContext, spec: ProofSpec) -> None:
    """Train as one rank of the layout under proof and leave the record in the spec's folder."""
    config = spec.config
    group = process_group(
        rank=context.rank,
        num_ranks=context.num_ranks,
        device=torch.device("cpu"),
        timeout_s=config.train.timeout_s,
        store_path=context.store_path,
        needed=layout_needs_mesh(config),
    )
    with group, naming_collectives():
        record = record_rank(config, context, open_training_data(config), num_steps=spec.num_steps)
        torch.save(vars(record), spec.record(context.rank))


def compare_with_reference(context: RankContext, spec: ProofSpec) -> None:
    """Compute the reference, compare the ranks' records with it, and leave the result in the spec's folder."""
    context.post("comparing")
    num_ranks = spec.config.mesh.axes().num_ranks()
    records = [RankRecord(**torch.load(spec.record(rank), weights_only=True)) for rank in range(num_ranks)]
    result = conclude(spec.config, records, num_steps=spec.num_steps)
    answer = {"report": to_json(result), "lines": render(result)}
    spec.result.write_text(json.dumps(answer), "utf-8")


def conclude(config: RunConfig, records: list[RankRecord], *, num_steps: int) -> ProofResult:
    """Compare the ranks' records, by rank, with the reference."""
    reference = compute_reference(config, open_training_data(config), num_steps=num_steps)
    return compare(gather_evidence(config, records), reference)
