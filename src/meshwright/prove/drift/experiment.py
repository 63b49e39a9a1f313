"""Launcher of the drift experiment, which measures distances between copies of shared parameters.

Torch-free; `record` runs on the ranks and `draw` plots the result.
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
"""Default preset and overrides."""

SHARING_OVERRIDES = (
    ("mesh.pp=2",),
    ("model.tie_embeddings=true",),
    ("mesh.pp=2", "model.tie_embeddings=true"),
    ("mesh.pp=2", "train.num_microbatches=2"),
    ("mesh.pp=2", "train.num_microbatches=2", "model.tie_embeddings=true"),
)
"""Overrides that cause stages to share a parameter, shortest first."""


def load_sharing(source: str | None, overrides: Sequence[str]) -> RunConfig:
    """Load the configuration to train, with the device set to CPU.

    Raises:
        LayoutError: stages share no parameter.
        MeshwrightError: the configuration is invalid.
    """
    if source is None and not overrides:
        source, overrides = DEFAULT_LAYOUT
    source = source or DEFAULT_LAYOUT[0]
    config = load(source, overrides)
    if not _has_shared_parameters(config):
        raise LayoutError(
            "no parameter is shared between stages, so nothing can drift",
            where=" ".join(["command line,", source, *overrides]),
            rule="embedders that every stage uses are shared by all stages, tied embeddings "
            "(model.tie_embeddings) by the first and the last; stages come from mesh.pp or pipeline.chunks",
            fix=" ".join(_suggest_overrides(source, overrides)),
        )
    train = config.train.model_copy(update={"device": "cpu", "compile": False, "trace": False})
    return config.model_copy(update={"train": train})


def measure_drift(config: RunConfig, *, num_steps: int) -> DriftResult:
    """Train with and without gradient sync of shared parameters, in local processes."""
    steps = max(num_steps, config.train.steps)
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    config.family.open_data(run_facts(config))
    with tempfile.TemporaryDirectory(prefix="meshwright-drift-") as folder:
        spec = DriftSpec(config, num_steps, Path(folder) / "result.json")
        launch(drift_body, spec, num_ranks=config.mesh.axes().num_ranks(), threads=config.train.threads)
        return from_json(spec.result.read_text("utf-8"))


def drift_body(context: RankContext, spec: DriftSpec) -> None:
    """Run one rank of the experiment; torch is imported only on the ranks."""
    from meshwright.prove.drift.record import record_drift

    record_drift(context, spec)


def _has_shared_parameters(config: RunConfig) -> bool:
    return bool(make_plan(config).shared)


def _suggest_overrides(source: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return overrides that cause stages to share a parameter, or the default command if there are none."""
    for extra in SHARING_OVERRIDES:
        try:
            if _has_shared_parameters(load(source, [*overrides, *extra])):
                return extra
        except MeshwrightError:
            continue
    return ("meshwright", "draw", "drift", DEFAULT_LAYOUT[0], *DEFAULT_LAYOUT[1])
