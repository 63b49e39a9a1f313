"""Loads under which `meshwright plan` predicts a step: `--experts` and `--documents`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.plan.run_plan import RunPlan

MAX_EXPONENT = 10.0
EXPERTS, DOCUMENTS = "command line, --experts", "command line, --documents"


def under_load(experts: str, documents: str, *, is_timed: bool) -> Callable[[RunPlan], RunPlan]:
    """Return the function that puts a plan under the load that the options state.

    Raises:
        InputError: no time is predicted, an option can't be parsed, or the run has no counts.
    """
    if not is_timed:
        what, rule = "a load without the time of a plan", "--experts and --documents change the time of a step"
        raise InputError(what, where="command line", rule=rule, fix="--cluster H100 beside them, without --devices")
    from meshwright.plan.time.load import Load, loaded

    lengths = [int(one) if one.isdecimal() else 0 for one in documents.split(",") if documents]
    if 0 in lengths:
        what, rule = f"--documents {documents}", "takes lengths of documents, which are repeated to fill a sample"
        raise InputError(what, where=DOCUMENTS, rule=rule, fix="--documents 512,2048")
    name, _, exponent = experts.partition(":")
    if name == "zipf":
        return partial(loaded, load=Load(_exponent(exponent or "1"), documents=tuple(lengths)))
    counts = {} if experts in ("", "balanced") else _counts(Path(experts))
    return partial(loaded, load=Load(counts=counts, documents=tuple(lengths)))


def _exponent(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= MAX_EXPONENT:
        rule = f"Zipf's exponent is a number from 0 to {MAX_EXPONENT:g}"
        raise InputError(f"--experts zipf:{text}", where=EXPERTS, rule=rule, fix="--experts zipf:1")
    return found


def _counts(folder: Path) -> Mapping[int | None, Sequence[int]]:
    """Return the tokens of each expert, by layer, in the last step of which a run recorded them."""
    from meshwright.plan.stage_sizes import load_rows
    from meshwright.train.report.run_data import read_run

    run = read_run(folder)
    found = [line["expert_counts"] for line in run.steps if line.get("expert_counts")]
    if run.plan is None or not found:
        rule = "takes balanced, zipf, zipf:EXPONENT, or the folder of a run whose model has experts"
        raise InputError(f"{folder} has no counts of experts", where=EXPERTS, rule=rule, fix="--experts zipf")
    return {row.layer: counts for row, counts in zip(load_rows(run.plan), found[-1], strict=True)}
