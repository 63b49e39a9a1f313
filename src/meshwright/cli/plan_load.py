"""Loads under which `meshwright plan` predicts a step: `--experts` and `--documents`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.errors import InputError
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.stage_sizes import load_rows
from meshwright.plan.time.load import loaded
from meshwright.train.report.run_data import read_run


def under_load(plan: RunPlan, experts: str, documents: str) -> RunPlan:
    """Return a plan under the load that the options state.

    Raises:
        InputError: an option can't be parsed, or the run has no counts, or those of another model.
    """
    if not re.fullmatch(r"([1-9]\d*(,[1-9]\d*)*)?", documents):
        what, rule = f"--documents {documents}", "takes lengths of documents, which are repeated to fill a sample"
        raise InputError(what, where="command line, --documents", rule=rule, fix="--documents 512,2048")
    lengths = [int(one) for one in documents.split(",") if one]
    zipf = re.fullmatch(r"zipf(:(\d+(\.\d+)?))?", experts)
    if zipf:
        exponent = float(zipf[2] or 1)
        return loaded(plan, lambda layer, _: [expert**-exponent for expert in range(1, layer.num_experts + 1)], lengths)
    counts = _counts(Path(experts)) if experts else {}
    return loaded(plan, (lambda _, number: counts.get(number, ())) if experts else None, lengths)


def _counts(folder: Path) -> Mapping[int | None, Sequence[int]]:
    """Return the tokens of each expert, by layer, in the last step of which a run recorded them."""
    run = read_run(folder)
    found = [line["expert_counts"] for line in run.steps if line.get("expert_counts")]
    if run.plan is None or not found:
        rule = "takes zipf, zipf:EXPONENT, or the folder of a run whose model has experts"
        raise InputError(
            f"{folder} has no counts of experts", where="command line, --experts", rule=rule, fix="--experts zipf"
        )
    return {row.layer: counts for row, counts in zip(load_rows(run.plan), found[-1], strict=True)}
