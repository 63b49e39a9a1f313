"""What becomes of copies of shared parameters when their gradients aren't added up: what is asked, what was seen.

Torch-free: the launcher asks, `drift_record` runs on the ranks, `drift_draw` makes the picture.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.plan.load_config import load
from meshwright.plan.make_plan import make_plan
from meshwright.prove.drift.result import DriftResult, DriftSpec, from_json
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext

DEFAULT_LAYOUT = ("dit-digits", ("mesh.pp=2", "pipeline.chunks=2"))
"""Preset and words where none are given."""

SHARING_OVERRIDES = (
    ("mesh.pp=2",),
    ("model.tie_embeddings=true",),
    ("mesh.pp=2", "model.tie_embeddings=true"),
    ("mesh.pp=2", "train.num_microbatches=2"),
    ("mesh.pp=2", "train.num_microbatches=2", "model.tie_embeddings=true"),
)
"""Words that make a layout share something, the fewest first."""


def load_sharing(source: str | None, overrides: Sequence[str]) -> RunConfig:
    """The layout to train, on the CPU.

    Raises:
        LayoutError: it has no parameter with several copies.
        MeshwrightError: it is none.
    """
    if source is None and not overrides:
        source, overrides = DEFAULT_LAYOUT
    source = source or DEFAULT_LAYOUT[0]
    config = load(source, overrides)
    if not _has_shared_parameters(config):
        raise LayoutError(
            "no parameter of this layout is on several stages, so nothing can drift",
            where=" ".join(["command line,", source, *overrides]),
            rule="what every stage needs is shared by all of them, tied embeddings (model.tie_embeddings) by the first "
            "and the last; stages come from mesh.pp or pipeline.chunks",
            fix=" ".join(_suggest_overrides(source, overrides)),
        )
    train = config.train.model_copy(update={"device": "cpu", "compile": False, "trace": False})
    return config.model_copy(update={"train": train})


def measure_drift(config: RunConfig, *, num_steps: int) -> DriftResult:
    """Train the layout with and without the sum of shared gradients, on processes of this machine."""
    steps = max(num_steps, config.train.steps)
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    config.family.open_data(run_facts(config))
    with tempfile.TemporaryDirectory(prefix="meshwright-drift-") as folder:
        spec = DriftSpec(config, num_steps, Path(folder) / "result.json")
        launch(drift_body, spec, num_ranks=config.mesh.axes().num_ranks(), threads=config.train.threads)
        return from_json(spec.result.read_text("utf-8"))


def drift_body(context: RankContext, spec: DriftSpec) -> None:
    """What each rank runs; imports torch only there."""
    from meshwright.prove.drift.record import record_drift

    record_drift(context, spec)


def _has_shared_parameters(config: RunConfig) -> bool:
    return bool(make_plan(config).shared)


def _suggest_overrides(source: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """Words to add, or where none helps, the command that works."""
    for extra in SHARING_OVERRIDES:
        try:
            if _has_shared_parameters(load(source, [*overrides, *extra])):
                return extra
        except MeshwrightError:
            continue
    return ("meshwright", "draw", "drift", DEFAULT_LAYOUT[0], *DEFAULT_LAYOUT[1])
