"""Load a configuration or a plan file and check all rules of a run: those of its configuration, pipeline schedule,
stages and compilation, and that a run of a configuration can execute a plan written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.config import load as config_load
from meshwright.config import rules as config_rules
from meshwright.config.facts_for_family import model_facts
from meshwright.config.resolve import policy_of
from meshwright.config.schema import RunConfig
from meshwright.config.translate import value_named
from meshwright.errors import ConfigError, InputError, LayoutError, ScheduleError
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.pipeline.generate import schedule_kind
from meshwright.pipeline.schedule_table import Schedule
from meshwright.pipeline.split_layers import balance_layers
from meshwright.plan.compare import differences, hashes
from meshwright.plan.make_plan import compute_table, has_stages, is_table_file, make_plan, read_table, schedule_name
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import REGENERATE_FIX, from_json
from meshwright.plan.verify import verify
from meshwright.settings.violation import Fix, Violation, format_value
from meshwright.units import counted

SCHEDULE, LAYERS, MICROBATCHES = "pipeline.schedule", "pipeline.layers_per_stage", "train.num_microbatches"
NO_EMPTY_STAGE = "every stage has a layer, unless empty stages are allowed"
RUNS_EAGERLY = "a recomputed block with auxiliary losses or step buffers can't be compiled"


def violations(config: RunConfig, num_ranks: int | None) -> Iterator[Violation]:
    """Yield all violations of a run; only the first is reliable, as later rules assume that earlier ones hold.

    Args:
        config: configuration of the run.
        num_ranks: number of ranks started by a launcher; None if the verb starts them.
    """
    yield from config_rules.violations(config, num_ranks)
    yield from _pipeline(config)
    yield from _compiled_recompute(config)


def _pipeline(config: RunConfig) -> Iterator[Violation]:
    name, pp = schedule_name(config), config.mesh.pp
    meant = value_named(SCHEDULE, name)  # an unknown name in another spelling or framework
    own: list[Fix] = [{SCHEDULE: meant}] if meant not in (None, name) else []
    try:
        if has_stages(config):
            table = compute_table(config)
        else:  # a single stage ignores its schedule, but it exists, so that a run can resume on fewer ranks
            read_table(name) if is_table_file(name) else schedule_kind(name)
    except ScheduleError as error:
        if is_table_file(name):
            raise
        fixes: list[Fix] = [*own, {SCHEDULE: "auto"}]
        if has_stages(config):
            fixes = [*own, *({**fix, MICROBATCHES: 2 * pp} for fix in own), *_other_schedules(config)]
        yield Violation(LayoutError, error.what, SCHEDULE, error.rule, fixes)
        if has_stages(config):
            return
    if has_stages(config):
        yield from _table_file(config, table)
        yield from _layers(config, table)
        yield from _split_backward(config, table)
    elif (layers := config.pipeline.layers_per_stage) is not None and len(layers) > 1:
        what = f"{LAYERS} = {format_value(layers)}, but the model has one stage"
        fixes = [{"pipeline.chunks": len(layers)}, {LAYERS: None}]
        yield Violation(LayoutError, what, LAYERS, "layers are split over mesh.pp × pipeline.chunks stages", fixes)


def _other_schedules(config: RunConfig) -> list[Fix]:
    without_chunks: Fix = {"pipeline.chunks": None} if config.pipeline.chunks else {}
    fixes = [without_chunks, {MICROBATCHES: 2 * config.mesh.pp}, {SCHEDULE: "1f1b", **without_chunks}]
    return fixes if without_chunks else fixes[1:]


def _table_file(config: RunConfig, table: Schedule) -> Iterator[Violation]:
    """Check that a table file matches the run's number of ranks and micro-batches."""
    has, number = f"{table.kind} is a schedule for ", table.num_microbatches
    if table.num_ranks != config.mesh.pp:
        what = f"{has}{counted(table.num_ranks, 'rank')}, but mesh.pp = {config.mesh.pp}"
        fixes: list[Fix] = [{"mesh.pp": table.num_ranks}, {SCHEDULE: "1f1b"}]
        yield Violation(LayoutError, what, SCHEDULE, "a table has one line per pipeline rank", fixes)
    if number != config.train.num_microbatches:
        what = f"{has}{counted(number, 'micro-batch')}, but {MICROBATCHES} = {config.train.num_microbatches}"
        fixes = [{MICROBATCHES: number}, {SCHEDULE: "1f1b"}]
        yield Violation(LayoutError, what, SCHEDULE, "the number of micro-batches must match the table's", fixes)


def _layers(config: RunConfig, table: Schedule) -> Iterator[Violation]:
    """Check the layers of stages: every stage has one, unless empty stages are allowed."""
    per_stage, stages, layers = config.pipeline.layers_per_stage, table.num_stages, model_facts(config).num_layers
    allowed, pp = config.pipeline.allow_empty_stages, config.mesh.pp
    empty_allowed: Fix = {"pipeline.allow_empty_stages": True}
    if per_stage is None:
        if stages > layers and not allowed:
            fewer: list[Fix] = [{"pipeline.chunks": layers // pp}] if config.pipeline.chunks and layers >= pp else []
            fewer += [{"mesh.pp": pp * layers // stages}] if pp * layers >= stages else []
            what = f"{counted(stages, 'stage')} for model.num_layers = {counted(layers, 'layer')}"
            fixes = [*fewer, empty_allowed, {"model.num_layers": stages}]
            yield Violation(LayoutError, what, "pipeline.chunks" if pp == 1 else "mesh.pp", NO_EMPTY_STAGE, fixes)
        return
    fits = balance_layers([1.0] * layers, stages, allow_empty=allowed or stages > layers)
    fixes = [{LAYERS: fits}, {LAYERS: None}]
    what = f"{LAYERS} = {format_value(per_stage)}"
    if len(per_stage) != stages:
        what += f" has {counted(len(per_stage), 'entry')} for {counted(stages, 'stage')}"
        rule = "there must be one entry per stage (mesh.pp × chunks), in order"
        yield Violation(LayoutError, what, LAYERS, rule, fixes)
    elif sum(per_stage) != layers or min(per_stage) < 0:
        what += f" has {counted(sum(per_stage), 'layer')} for model.num_layers = {layers}"
        fixes += [{"model.num_layers": sum(per_stage)}] if min(per_stage) >= 0 else []
        yield Violation(LayoutError, what, LAYERS, "the numbers of layers must add up to model.num_layers", fixes)
    elif min(per_stage) == 0 and not allowed:
        what += f" leaves stage {per_stage.index(0)} without layers"
        yield Violation(LayoutError, what, LAYERS, NO_EMPTY_STAGE, [empty_allowed, *fixes])


def _split_backward(config: RunConfig, table: Schedule) -> Iterator[Violation]:
    """Check that the gradients of all matrices can be deferred if the schedule splits the backward."""
    if not table.splits_backward:
        return
    name, others = schedule_name(config), _other_schedules(config)[-1:]
    if undeferred := model_facts(config).undeferred:
        what = f"{name} splits the backward, but the gradient of {undeferred} can't be deferred"
        rule = "a split backward needs layers that can defer the gradients of their matrices: linear layers, embeddings"
        yield Violation(LayoutError, what, SCHEDULE, rule, others)
    if config.train.compile:
        rule = "a compiled block can't defer the gradients of its weights"
        fixes = [{"train.compile": False}, *others]
        what = f"train.compile with {name}, which splits the backward"
        yield Violation(ConfigError, what, "train.compile", rule, fixes)


def _compiled_recompute(config: RunConfig) -> Iterator[Violation]:
    """Reject compilation of recomputed blocks with step handles: these are recorded outside the graph, so the block
    would silently run in eager mode."""
    blocks = config.recompute.blocks
    for layer, kind in enumerate(model_facts(config).layers if config.train.compile else ()):
        policy = policy_of(config.recompute, layer)
        if policy != RecomputePolicy.NONE and (handles := step_handles(config, kind)):
            has = f"layer {layer} recomputed under the policy {policy}" if blocks else f"recompute.policy = {policy}"
            what = f"train.compile with {has}, but {kind} has {handles[0]}"
            off: Fix = {"recompute.policy": "none", **({"recompute.blocks": ()} if blocks else {})}
            yield Violation(ConfigError, what, "train.compile", RUNS_EAGERLY, [off, {"train.compile": False}])
            return


def step_handles(config: RunConfig, kind: str) -> list[str]:
    """Return the auxiliary losses and step buffers in blocks of this kind, and losses of the end that count there."""
    found = [one for one in model_facts(config).kinds if one.name == kind]
    losses = [loss.name for one in found for loss in one.auxiliary]
    losses += [loss.name for one in model_facts(config).last for loss in one.auxiliary if loss.num_counts]
    return losses + [buffer.name for one in found for buffer in one.buffers if buffer.updated]


def load(
    source: str | None, overrides: Sequence[str] = (), *, defaults: Sequence[str] = (), num_ranks: int | None = None
) -> RunConfig:
    """Load a preset or a file, apply overrides and check all rules; takes the arguments of `config.load.load`.

    Raises:
        ConfigError: a preset, family or key is unknown, or a value is invalid.
        LayoutError: the mesh, batch or stages do not fit.
    """
    return config_load.load(source, overrides, defaults=defaults, num_ranks=num_ranks, rules=violations)


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
        what = f"can't read {path}: {getattr(error, 'strerror', None) or error}"
        fix = f"meshwright plan, with the words of this command and -o {path}"
        raise InputError(what, where=where, rule="a plan is a file written by meshwright plan", fix=fix) from None
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
            rule = "mesh, batch, dtypes, optimizer and frozen parameters are set in the configuration"
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
    fix = f"{settings or 'the preset and overrides of the plan'}, or {REGENERATE_FIX}"
    return ConfigError(what, where=where, rule=rule, fix=fix)
