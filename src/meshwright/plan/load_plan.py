"""Load a plan file, written by `meshwright plan -o` or edited by hand, and check it against a configuration."""

from __future__ import annotations

from pathlib import Path

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, InputError
from meshwright.plan.compare import differences, hashes
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import RUNS_EAGERLY, step_handles
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import REGENERATE_FIX, from_json
from meshwright.plan.verify import verify

CONFIG_FIELDS = ("mesh.atoms", "mesh.views", "masters", "sequence_parallel", "batch", "edge", "optimizer", "loss")
"""Fields that must match the configuration, because other code reads them from there."""
MODEL_FIELDS = (
    "path", "collectives", "saved", "output_elements", "auxiliary", "buffers", "everywhere", "experts",
)  # fmt: skip
"""Fields of kinds derived from the family's description and styles."""


def read_plan(path: Path, *, where: str = "command line, --plan") -> RunPlan:
    """Read a plan from a file; `where` is the origin of the path, for errors.

    Raises:
        InputError: the file can't be read.
        ConfigError: the file is not a plan or has a different version.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"can't read {path}: {getattr(error, 'strerror', None) or error}",
            where=where,
            rule="a plan is a file written by meshwright plan",
            fix=f"meshwright plan, with the words of this command and -o {path}",
        ) from None
    return from_json(text, where=str(path))


def load_plan(path: Path, config: RunConfig) -> RunPlan:
    """Read a plan from a file and check that a run of `config` can execute it.

    Raises:
        InputError, ConfigError, LayoutError: see `read_plan` and `check_fits`.
    """
    return check_fits(read_plan(path), config, where=str(path))


def check_fits(plan: RunPlan, config: RunConfig, *, where: str) -> RunPlan:
    """Check that a run of `config` can execute a plan.

    The model, mesh and batch must match. Stages, FSDP units, recomputation, compilation, codecs and the schedule may
    differ.

    Args:
        plan: plan to check.
        config: configuration of the run.
        where: origin of the plan, for errors.

    Raises:
        ConfigError: the plan has a different model, mesh or batch.
        LayoutError: the plan is incorrect.
    """
    verify(plan, where=where)
    made = make_plan(config, nodes=plan.mesh.nodes)
    if hashes(plan).model != hashes(made).model:
        rule = "parameter names and shapes must match the configuration's model"
        raise _mismatch("the plan is for another model", rule, where)
    for one in differences(plan, made):
        if one.path.startswith(CONFIG_FIELDS) or one.path.endswith(".trained"):
            what = f"{one.path} is {one.first} in the plan, but {one.second} in the configuration"
            rule = "mesh, batch, dtypes and frozen parameters are set in the configuration"
            raise _mismatch(what, rule, where, " ".join(_settings(plan, made, config)))
    model_kinds = {kind.described: kind for kind in made.kinds}
    for kind in plan.kinds:
        model_kind = model_kinds.get(kind.described)
        if model_kind is None:
            what = f"kinds[{kind.name}] in the plan is of kind {kind.described!r}, which the model does not have"
            raise _mismatch(what, f"the model's kinds are {', '.join(model_kinds)}", where)
        for field in MODEL_FIELDS:
            if getattr(kind, field) != getattr(model_kind, field):
                what = f"kinds[{kind.name}].{field} in the plan differs from the model's"
                raise _mismatch(what, "these fields follow from the model's description and styles", where)
        handles = step_handles(config, kind.described)
        if kind.compiled and kind.recompute != "none" and handles:
            what = f"kinds[{kind.name}] is compiled and recomputed, but has {handles[0]}"
            raise _mismatch(what, RUNS_EAGERLY, where)
    return plan


def _settings(plan: RunPlan, made: RunPlan, config: RunConfig) -> list[str]:
    """Return the words that give a configuration the mesh and batch of a plan."""
    axes = config.mesh.axes()
    found = [f"mesh.{axis}={size}" for axis, size in plan.mesh.atoms if axes.size(axis) != size]
    planned = {"global_batch": plan.batch.global_batch, "num_microbatches": plan.batch.num_microbatches}
    if made.batch.tokens == config.train.seq_len:  # a sample is text
        planned["seq_len"] = plan.batch.tokens
    return found + [f"train.{key}={value}" for key, value in planned.items() if getattr(config.train, key) != value]


def _mismatch(what: str, rule: str, where: str, settings: str = "") -> ConfigError:
    return ConfigError(
        what,
        where=where,
        rule=rule,
        fix=f"{settings or 'the preset and overrides of the plan'}, or {REGENERATE_FIX}",
    )
