"""Rules of the pipeline: its table against the mesh and the micro-batches, its stages against the layers."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.breach import Breach, Way, as_word
from meshwright.config.pipeline import compute_table, has_stages, is_file, read_table, schedule_name
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError, ScheduleError
from meshwright.pipeline.generate import schedule_kind
from meshwright.pipeline.stages import balanced
from meshwright.pipeline.table import Schedule


def pipeline_breaches(config: RunConfig) -> Iterator[Breach]:
    """The rules of the pipeline that `config` breaks."""
    if not has_stages(config):
        yield from _without_stages(config)
        return
    try:
        table = compute_table(config)
    except ScheduleError as error:
        if is_file(schedule_name(config)):
            raise
        yield Breach(LayoutError, error.what, "pipeline.schedule", error.rule, _other_schedules(config))
        return
    yield from _file(config, table)
    yield from _layers(config, table)
    if config.train.compile and table.splits_backward:
        yield Breach(
            ConfigError,
            f"train.compile with {schedule_name(config)}, whose backward comes in two parts",
            "train.compile",
            "a compiled block can't put the gradients of its weights off",
            [{"train.compile": False}, *_other_schedules(config)[-1:]],
        )


def _without_stages(config: RunConfig) -> Iterator[Breach]:
    """A schedule has no effect here, and a run that goes on with fewer ranks keeps its own; but there has to be one."""
    chosen = schedule_name(config)
    try:
        read_table(chosen) if is_file(chosen) else schedule_kind(chosen)
    except ScheduleError as error:
        if is_file(chosen):
            raise
        yield Breach(LayoutError, error.what, "pipeline.schedule", error.rule, [{"pipeline.schedule": "auto"}])
    given = config.pipeline.layers_per_stage
    if given is not None and len(given) > 1:
        yield Breach(
            LayoutError,
            f"pipeline.layers_per_stage = {as_word(given)}, and the model has one stage",
            "pipeline.layers_per_stage",
            "layers are divided over mesh.pp × pipeline.chunks stages",
            [{"pipeline.chunks": len(given)}, {"pipeline.layers_per_stage": None}],
        )


def _other_schedules(config: RunConfig) -> list[Way]:
    without_chunks: Way = {"pipeline.chunks": None} if config.pipeline.chunks else {}
    return [
        *([without_chunks] if without_chunks else []),
        {"train.num_microbatches": 2 * config.mesh.pp},
        {"pipeline.schedule": "1f1b", **without_chunks},
    ]


def _file(config: RunConfig, table: Schedule) -> Iterator[Breach]:
    """A table from a file is for one number of ranks and of micro-batches."""
    if table.num_ranks != config.mesh.pp:
        yield Breach(
            LayoutError,
            f"{table.kind} is a schedule for {table.num_ranks} ranks, and mesh.pp = {config.mesh.pp}",
            "pipeline.schedule",
            "a table has a line for each rank of the pipeline",
            [{"mesh.pp": table.num_ranks}, {"pipeline.schedule": "1f1b"}],
        )
    if table.num_microbatches != config.train.num_microbatches:
        yield Breach(
            LayoutError,
            f"{table.kind} is a schedule for {table.num_microbatches} micro-batches, and train.num_microbatches = "
            f"{config.train.num_microbatches}",
            "pipeline.schedule",
            "a table has actions for each micro-batch of the step",
            [{"train.num_microbatches": table.num_microbatches}, {"pipeline.schedule": "1f1b"}],
        )


def _layers(config: RunConfig, table: Schedule) -> Iterator[Breach]:
    given, stages, layers = config.pipeline.layers_per_stage, table.num_stages, config.model.num_layers
    allowed = config.pipeline.allow_empty_stages
    if stages > layers and not allowed and given is None:
        pp = config.mesh.pp
        fewer: list[Way] = [{"pipeline.chunks": layers // pp}] if config.pipeline.chunks and layers >= pp else []
        fewer += [{"mesh.pp": pp * layers // stages}] if pp * layers >= stages else []
        yield Breach(
            LayoutError,
            f"{stages} stages for model.num_layers = {layers} layers",
            "pipeline.chunks" if pp == 1 else "mesh.pp",
            "every stage has a layer, unless empty stages are allowed",
            [*fewer, {"pipeline.allow_empty_stages": True}, {"model.num_layers": stages}],
        )
    if given is None:
        return
    fits = balanced([1.0] * layers, stages, allow_empty=allowed or stages > layers)
    ways: list[Way] = [{"pipeline.layers_per_stage": fits}, {"pipeline.layers_per_stage": None}]
    what = f"pipeline.layers_per_stage = {as_word(given)}"
    if len(given) != stages:
        yield Breach(
            LayoutError,
            f"{what} has {len(given)} entries for {stages} stages",
            "pipeline.layers_per_stage",
            "an entry for each of mesh.pp × chunks stages, in the model's order",
            ways,
        )
    elif sum(given) != layers or min(given) < 0:
        yield Breach(
            LayoutError,
            f"{what} has {sum(given)} layers for model.num_layers = {layers}",
            "pipeline.layers_per_stage",
            "the stages together have every layer once",
            [*ways, {"model.num_layers": sum(given)}] if min(given) >= 0 else ways,
        )
    elif min(given) == 0 and not allowed:
        yield Breach(
            LayoutError,
            f"{what} leaves stage {given.index(0)} without a layer",
            "pipeline.layers_per_stage",
            "every stage has a layer, unless empty stages are allowed",
            [{"pipeline.allow_empty_stages": True}, *ways],
        )
