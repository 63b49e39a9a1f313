"""Pipeline schedule of a configuration, and its split of layers into stages.

These are pure functions of the configuration, so the launcher, ranks and plan always agree. Doesn't import torch.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import ScheduleError
from meshwright.pipeline.generate import generate
from meshwright.pipeline.lower import LowerOptions, lower
from meshwright.pipeline.schedule_table import Schedule, single_stage
from meshwright.pipeline.split_layers import balance_layers
from meshwright.pipeline.verify import verify


def is_table_file(schedule: str) -> bool:
    """Return whether `pipeline.schedule` is the path of a table file rather than the name of a schedule."""
    return "/" in schedule or schedule.endswith(".csv")


def has_stages(config: RunConfig) -> bool:
    """Return whether the model is split into several stages, across ranks or as chunks on one rank."""
    return config.mesh.pp > 1 or (config.pipeline.chunks or 1) > 1


def schedule_name(config: RunConfig) -> str:
    """Return `pipeline.schedule` with `auto` resolved."""
    if config.pipeline.schedule != "auto":
        return config.pipeline.schedule
    return "interleaved" if (config.pipeline.chunks or 1) > 1 else "1f1b"


def compute_table(config: RunConfig) -> Schedule:
    """Return the schedule before lowering; without pipeline parallelism, it has a single stage.

    Raises:
        ScheduleError: the schedule is unknown, or its file is invalid.
    """
    if not has_stages(config):
        return single_stage(config.train.num_microbatches)
    chosen = schedule_name(config)
    if is_table_file(chosen):
        return read_table(chosen)
    return generate(
        chosen,
        num_stages=config.mesh.pp,
        num_microbatches=config.train.num_microbatches,
        num_chunks=config.pipeline.chunks,
    )


def read_table(path: str) -> Schedule:
    """Read and verify a schedule from a CSV file.

    Raises:
        ScheduleError: the file can't be read, is not a schedule, or fails verification.
    """
    try:
        source = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"can't read {path}: {getattr(error, 'strerror', None) or error}",
            where="pipeline.schedule",
            rule="a schedule is a name or the path to a CSV table",
            fix="pipeline.schedule=1f1b",
        ) from None
    table = Schedule.from_csv(source, where=path, kind=path)
    try:
        verify(table)
    except ScheduleError as error:
        raise ScheduleError(error.what, where=f"{path}, {error.where}", rule=error.rule, fix=error.fix) from None
    return table


def num_stages(config: RunConfig) -> int:
    """Return the number of stages over all ranks."""
    return compute_table(config).num_stages


def layers_per_stage(config: RunConfig) -> tuple[int, ...]:
    """Return the number of layers per stage, as configured or balanced by FLOPs including the ends.

    FLOPs are those of samples that are one document. Packed ones take fewer, by as much in each block with the same
    mask, so blocks are overrated beside the ends.

    Raises:
        ScheduleError: there are more stages than layers.
    """
    if config.pipeline.layers_per_stage is not None and has_stages(config):
        return config.pipeline.layers_per_stage
    facts = model_facts(config)
    return balance_layers(
        [facts.kind_of(layer).flops for layer in range(facts.num_layers)],
        num_stages(config),
        before=sum(kind.flops for kind in facts.first),
        after=sum(kind.flops for kind in facts.last),
        allow_empty=config.pipeline.allow_empty_stages,
    )


def lowered_table(config: RunConfig) -> Schedule:
    """Return the lowered schedule that a run executes."""
    table = compute_table(config)
    mesh = config.mesh
    reduces = mesh.axes().num_ranks() > mesh.pp or config.train.precision == "bfloat16"
    options = LowerOptions(
        release=config.pipeline.release,
        reduces=reduces,
        keeps_unsharded=reduces and has_stages(config) and not mesh.reshard_after_forward,
        shared=_shared_stages(config, table.num_stages),
    )
    lowered = lower(table, options)
    verify(lowered, shared=options.shared)
    return lowered


def _shared_stages(config: RunConfig, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of stages that share parameters: all stages if the family has ends on every stage, and the
    first and last if parameters are tied."""
    if num_stages == 1:
        return ()
    facts = model_facts(config)
    groups = {tuple(range(num_stages))} if any(kind.parameters for kind in facts.every) else set()
    if any(parameter.tied_to for kind in facts.last for parameter in kind.parameters):
        groups.add((0, num_stages - 1))
    return tuple(sorted(groups))
