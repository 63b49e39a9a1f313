"""`python -m tests.prove.sweep`: proofs of right runs by layout, seed and mode; any that fails is a false alarm."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import product

from meshwright.config.source import preset_names
from meshwright.plan.rules import load
from meshwright.prove.report import render
from meshwright.prove.spec import as_configured, as_proof
from tests.gangs.gang import GangPool
from tests.prove import proofs
from tests.prove.as_run import proofs as as_run
from tests.prove.as_run.test_layouts import BATCH, LAYOUTS, MATRIX, VARIANTS, small_preset

EVERY = 25
"""Proofs between two lines that say how far it is."""


def main() -> int:
    """Prove each layout with each seed in both modes, and print the alarms."""
    parser = argparse.ArgumentParser(prog="python -m tests.prove.sweep", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    kinds, alarms, num_proofs, started = set(), 0, 0, time.monotonic()
    with closing(GangPool()) as gang:
        for what, preset, words, sizes in _runs(options.seeds):
            kinds.add(what)
            for mode, lines in _proofs(gang, preset, words, sizes):
                num_proofs += 1
                if lines:
                    alarms += 1
                    print(f"ALARM {mode}: {preset} {' '.join(words)}", *lines, sep="\n", flush=True)
                if num_proofs % EVERY == 0:
                    print(f"{num_proofs} proofs, {alarms} alarms", flush=True)
    took = time.monotonic() - started
    print(f"{len(kinds)} layouts, {options.seeds} seeds, {num_proofs} proofs, {alarms} alarms in {took:.0f} s")
    return int(alarms > 0)


Run = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def _runs(num_seeds: int) -> Iterator[Run]:
    """Yield a name of the layout, preset, words and sizes of each run."""
    cases = sorted({(preset, layout, variant) for preset, layout, _, variant in MATRIX})
    for (preset, layout, variant), seed in product(cases, range(num_seeds)):
        words = (BATCH, *LAYOUTS[layout], *VARIANTS[variant], f"train.seed={seed}")
        yield f"{preset} {layout} {variant}", preset, words, as_run.SIZES[preset]
    for preset, seed in product(preset_names(), range(num_seeds)):
        yield f"preset {preset}", preset, (f"train.seed={seed}",), small_preset(preset)


def _proofs(
    gang: GangPool, preset: str, words: tuple[str, ...], sizes: tuple[str, ...]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each mode with what its proof says if it fails."""
    exact = proofs.proof(gang, as_proof(load(preset, [*sizes, *words])))
    yield "in float64", [] if exact.passed else render(exact)
    rounded = as_configured(load(preset, [*sizes, "train.precision=bfloat16", *words]))
    found = as_run.proof(gang, rounded, steps=2)
    yield "as run", [] if found.passed else render(found)


if __name__ == "__main__":
    raise SystemExit(main())
