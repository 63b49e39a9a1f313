"""A plan from a file, made by `meshwright plan -o` or changed by hand, for a run of a configuration."""

from __future__ import annotations

from pathlib import Path

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, InputError
from meshwright.plan.compare import differences, hashes
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import RUNS_EAGERLY, step_handles
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import from_json
from meshwright.plan.verify import verify

OF_CONFIGURATION = ("mesh.atoms", "masters", "sequence_parallel", "batch", "edge", "optimizer", "loss")
"""Fields that other parts of a run read off the configuration: a plan may not differ there."""
OF_MODEL = ("path", "collectives", "saved_elements", "output_elements", "auxiliary", "buffers", "everywhere")
"""Fields of kinds that follow from the family's description and its styles."""


def read_plan(path: Path, *, where: str = "command line, --plan") -> RunPlan:
    """The plan in a file, which was named at `where`.

    Raises:
        InputError: it can't be read; ConfigError: it is no plan, or one of another version.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"can't read {path}: {getattr(error, 'strerror', None) or error}",
            where=where,
            rule="a plan is a file that meshwright plan writes",
            fix=f"meshwright plan … -o {path}",
        ) from None
    return from_json(text, where=str(path))


def adopt_plan(path: Path, config: RunConfig) -> RunPlan:
    """The plan in a file as what a run of `config` does.

    Raises:
        InputError, ConfigError, LayoutError: as of `read_plan` and `check_fits`.
    """
    return check_fits(read_plan(path), config, where=str(path))


def check_fits(plan: RunPlan, config: RunConfig, *, where: str) -> RunPlan:
    """See that a run of `config` can do what a plan says.

    It may divide layers into other stages and parameters into other units, recompute, compile or send otherwise, with
    another schedule; but it is of the same model, mesh and batch.

    Args:
        plan: made or changed by hand.
        config: of the run.
        where: the plan comes from, for errors.

    Raises:
        ConfigError: the plan is of another model, mesh or batch. LayoutError: it is wrong.
    """
    verify(plan, where=where)
    made = make_plan(config, nodes=plan.mesh.nodes)
    if hashes(plan).model != hashes(made).model:
        rule = "parameters' names and shapes are those of the configuration's model"
        raise _does_not_fit("the plan is of another model", rule, where)
    for one in differences(plan, made):
        if one.path.startswith(OF_CONFIGURATION) or one.path.endswith(".trained"):
            what = f"the plan has {one.first} for {one.path}, and the configuration {one.second}"
            raise _does_not_fit(what, "mesh, batch, dtypes and what is trained are set in the configuration", where)
    of_model = {kind.described: kind for kind in made.kinds}
    for kind in plan.kinds:
        twin = of_model.get(kind.described)
        if twin is None:
            what = f"the plan has kinds[{kind.name}] of {kind.described!r}, which the model has none of"
            raise _does_not_fit(what, f"the model's kinds are {', '.join(of_model)}", where)
        for field in OF_MODEL:
            if getattr(kind, field) != getattr(twin, field):
                what = f"the plan has other {field} for kinds[{kind.name}] than the model"
                raise _does_not_fit(what, "what operators move, keep and add follows from the model's styles", where)
        handles = step_handles(config, kind.described)
        if kind.compiled and kind.recompute != "none" and handles:
            what = f"kinds[{kind.name}] is compiled and recomputed, and has {handles[0]}"
            raise _does_not_fit(what, RUNS_EAGERLY, where)
    return plan


def _does_not_fit(what: str, rule: str, where: str) -> ConfigError:
    return ConfigError(
        what,
        where=where,
        rule=rule,
        fix="the preset and words that the plan was made with; or meshwright plan … -o FILE with these",
    )
