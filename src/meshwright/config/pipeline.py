"""The pipeline that a configuration asks for: its table and the layers of its stages.

Torch-free and a pure function of the configuration: the launcher, every rank and the plan get the same values.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from meshwright.config.schema import RunConfig
from meshwright.errors import ScheduleError
from meshwright.pipeline.generate import default_chunks, generate, schedule_kind
from meshwright.pipeline.lower import LowerOptions, lower
from meshwright.pipeline.stages import balanced
from meshwright.pipeline.table import Schedule, one_stage
from meshwright.pipeline.verify import verify


def is_file(schedule: str) -> bool:
    """Whether `pipeline.schedule` names a table's file, and not a schedule that can be generated."""
    return "/" in schedule or schedule.endswith(".csv")


def compute_table(config: RunConfig) -> Schedule:
    """The table before lowering; without pipeline parallelism that of one stage.

    Raises:
        ScheduleError: there is no such table.
    """
    if config.mesh.pp == 1:
        return one_stage(config.train.num_microbatches)
    chosen = config.pipeline.schedule
    if is_file(chosen):
        return read_table(chosen)
    return generate(
        chosen,
        num_stages=config.mesh.pp,
        num_microbatches=config.train.num_microbatches,
        num_chunks=config.pipeline.num_chunks,
    )


def read_table(path: str) -> Schedule:
    """The CSV table in a file.

    Raises:
        ScheduleError: it can't be read, is no table, or one that `verify` refuses.
    """
    try:
        source = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"can't read {path}: {getattr(error, 'strerror', None) or error}",
            where="pipeline.schedule",
            rule="a schedule is a name, or the path of a CSV table",
            fix="pipeline.schedule=1f1b",
        ) from None
    table = Schedule.from_csv(source, where=path, kind=path)
    try:
        verify(table)
    except ScheduleError as error:
        raise ScheduleError(error.what, where=f"{path}, {error.where}", rule=error.rule, fix=error.fix) from None
    return table


def num_stages(config: RunConfig) -> int:
    """Stages over all ranks."""
    return compute_table(config).num_stages


def num_chunks(config: RunConfig) -> int:
    """Stages a rank, where the schedule has a name."""
    return config.pipeline.num_chunks or default_chunks(schedule_kind(config.pipeline.schedule))


def layers_per_stage(config: RunConfig) -> tuple[int, ...]:
    """Blocks of each stage: as given, or balanced by floating-point operations with embedding and head counted.

    Raises:
        ScheduleError: there are more stages than layers.
    """
    if config.pipeline.layers_per_stage is not None and config.mesh.pp > 1:
        return config.pipeline.layers_per_stage
    spec = config.model.spec()
    return balanced(
        [spec.layer_flops(config.train.seq_len)] * spec.num_layers,
        num_stages(config),
        before=spec.embedding_flops(),
        after=spec.head_flops(),
        allow_empty=config.pipeline.allow_empty_stages,
    )


def lowered_table(config: RunConfig) -> Schedule:
    """The table that a run executes."""
    return _lowered(config.model_dump_json())


@lru_cache(maxsize=4)
def _lowered(config_json: str) -> Schedule:
    config = RunConfig.model_validate_json(config_json)
    table = compute_table(config)
    mesh, last = config.mesh, table.num_stages - 1
    reduces = mesh.axes().data_parallel() > 1 or mesh.tp > 1 or config.train.precision == "bfloat16"
    options = LowerOptions(
        release=config.pipeline.release,
        reduces=reduces,
        keeps_unsharded=reduces and mesh.pp > 1 and not mesh.reshard_after_forward,
        shared=((0, last),) if config.model.tie_embeddings and last > 0 else (),
    )
    lowered = lower(table, options)
    verify(lowered, shared=options.shared)
    return lowered


def action_words(config: RunConfig, rank: int, position: int) -> str:
    """What a rank of the mesh does at a position of its row: `2F3: forward of micro-batch 3 on stage 2`."""
    row = lowered_table(config).actions[config.mesh.axes().coordinate(rank)["pp"]]
    parts = [part for action in row for part in action.parts()]
    return parts[position].words() if position < len(parts) else "the end of its row"
