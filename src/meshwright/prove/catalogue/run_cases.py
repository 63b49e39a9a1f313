"""Process entry points of the catalogue: ranks that record many cases, and processes that compare them."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.prove import driver
from meshwright.prove.catalogue.case import Case
from meshwright.train.launch.rank_context import RankContext


def record_cases(context: RankContext, cases: Sequence[Case]) -> None:
    """Train as one rank of each layout. An error ends the process, since other ranks may wait for it; the caller starts
    others for the cases that are left."""
    for case in cases:
        store = Path(case.spec.folder, "store")
        try:
            driver.record_layout(replace(context, store_path=str(store)), case.spec)
        except BaseException as error:
            if not case.error.exists():
                case.error.write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", "utf-8")
            raise
        (case.spec.folder / f"done-{context.rank}").touch()


def compare_cases(context: RankContext, cases: Sequence[Case]) -> None:
    """Compare this process's share of the cases with their references."""
    for case in cases[context.rank :: context.num_ranks]:
        try:
            driver.compare_with_reference(context, case.spec)
        except Exception as error:
            case.error.write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", "utf-8")
