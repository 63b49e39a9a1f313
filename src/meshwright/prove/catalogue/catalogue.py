"""Prove many models on many layouts: the same processes run case after case. Doesn't import torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import MeshwrightError, ModelError
from meshwright.plan.make_plan import make_plan
from meshwright.prove.catalogue.case import Case, Outcome, Result
from meshwright.prove.spec import ProofSpec, as_proof
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext

BATCH_CASES = 40
"""Cases whose records are kept at a time."""
COMPARERS = 2
"""Processes that compare records with references."""

Say = Callable[[Result], None]


@dataclass(frozen=True)
class Batch:
    """Cases of one number of ranks, run one after the other by the same processes."""

    cases: tuple[Case, ...]


def prove_all(
    configs: Iterable[tuple[str, str, Callable[[], RunConfig]]], *, steps: int, say: Say, batch_cases: int = BATCH_CASES
) -> list[Result]:
    """Prove models on layouts in float64, and return the outcomes in the order of completion.

    Args:
        configs: name of the model, name of the layout, and a function that returns the configuration. An error that it
            raises is a refusal: no process starts for the case.
        steps: optimizer steps to compare.
        say: called with each outcome.
        batch_cases: cases whose records are kept at a time.
    """
    results: list[Result] = []

    def note(found: Iterable[Result]) -> None:
        for one in found:
            results.append(one)
            say(one)

    with tempfile.TemporaryDirectory(prefix="meshwright-catalogue-") as folder:
        waiting: dict[int, list[Case]] = {}
        for number, (model, layout, make) in enumerate(configs):
            try:
                config = as_proof(make())
                spec = ProofSpec(config, make_plan(config), steps, Path(folder, str(number)))
                config.family.open_data(run_facts(config))
            except MeshwrightError as error:
                outcome = Outcome.NOT_BUILT if isinstance(error, ModelError) else Outcome.REFUSED
                note([Result(model, layout, outcome, error.what)])
                continue
            spec.folder.mkdir()
            ranks = config.mesh.axes().num_ranks()
            waiting.setdefault(ranks, []).append(Case(model, layout, spec))
            if len(waiting[ranks]) == batch_cases:
                note(_prove_batch(waiting.pop(ranks), ranks))
        for ranks, cases in waiting.items():
            note(_prove_batch(cases, ranks))
    return results


def _prove_batch(cases: list[Case], num_ranks: int) -> Iterator[Result]:
    preload = tuple(dict.fromkeys(name for case in cases for name in case.spec.config.family.preload))
    left = list(cases)
    while left:
        try:
            launch(record_body, Batch(tuple(left)), num_ranks=num_ranks, threads=1, preload=preload)
            left = []
        except MeshwrightError as error:
            failed = next((n for n, case in enumerate(left) if not _is_recorded(case, num_ranks)), len(left) - 1)
            if not left[failed].error.exists():
                left[failed].error.write_text(error.what, "utf-8")
            left = left[failed + 1 :]
    recorded = [case for case in cases if not case.error.exists()]
    if recorded:
        launch(compare_body, Batch(tuple(recorded)), num_ranks=COMPARERS, threads=1, preload=preload)
    for case in cases:
        yield case.outcome()
        for path in case.spec.folder.iterdir():
            path.unlink()


def _is_recorded(case: Case, num_ranks: int) -> bool:
    return all((case.spec.folder / f"done-{rank}").exists() for rank in range(num_ranks))


def record_body(context: RankContext, batch: Batch) -> None:
    """Record cases as one rank. Imports torch here to keep the launcher torch-free."""
    from meshwright.prove.catalogue.run_cases import record_cases

    record_cases(context, batch.cases)


def compare_body(context: RankContext, batch: Batch) -> None:
    """Compare cases with their references. Imports torch here to keep the launcher torch-free."""
    from meshwright.prove.catalogue.run_cases import compare_cases

    compare_cases(context, batch.cases)
