"""The argument SCHEDULE of `meshwright draw`: the name of a schedule, or the file of a table."""

from __future__ import annotations

import difflib
from pathlib import Path

from meshwright.errors import InputError, ScheduleError
from meshwright.pipeline import Schedule, generate
from meshwright.pipeline.generate import ScheduleKind
from meshwright.pipeline.verify import verify

COMMAND_LINE = "command line"
A_TABLE = "create one to start from: meshwright draw pipeline 1f1b --stages 4 --microbatches 8 --csv mine.csv"
SCHEDULE_HELP = f"{', '.join(kind.value for kind in ScheduleKind)}, or a table's file (.csv, .json)."


def load_schedule(
    source: str, stages: int | None, microbatches: int | None, chunks: int | None, *, command: str
) -> Schedule:
    """Generate the named schedule, or read one from a file and verify it.

    Args:
        source: name of a schedule, or path of a table.
        stages: pipeline ranks; needed with a name.
        microbatches: micro-batches per step; needed with a name.
        chunks: chunks per rank.
        command: command to name in an error.

    Raises:
        ScheduleError: the schedule is unknown, lacks a number, or differs from the file.
        InputError: the file can't be read.
    """
    if "/" in source or source.endswith((".csv", ".json")):
        schedule = _read(Path(source))
        asked = (("stages", stages, schedule.num_ranks, "ranks"),
                 ("microbatches", microbatches, schedule.num_microbatches, "micro-batches"),
                 ("chunks", chunks, schedule.num_chunks, "chunks"))  # fmt: skip
        for option, wanted, actual, name in asked:
            if wanted not in (None, actual):
                raise ScheduleError(
                    f"{source} has {actual} {name}, not {wanted}",
                    where=source,
                    rule=f"--{option} must match the file",
                    fix=f"--{option} {actual}, or leave it out",
                )
        return schedule
    name = source.lower().replace("_", "-")
    names = [kind.value for kind in ScheduleKind]
    if name not in names:
        from meshwright.config.translate import value_named

        near = value_named("pipeline.schedule", source) or next(
            iter(difflib.get_close_matches(name, names, n=1, cutoff=0.3)), "1f1b"
        )
        raise ScheduleError(
            f"unknown schedule {source!r}",
            where=COMMAND_LINE,
            rule=f"schedules are {', '.join(names)}; a file name has a / or ends with .csv or .json",
            fix=near,
        )
    if stages is None or microbatches is None:
        raise ScheduleError(
            f"{name} needs the number of {'stages' if stages is None else 'micro-batches'}",
            where=COMMAND_LINE,
            rule="a schedule by name needs --stages and --microbatches",
            fix=f"meshwright {command} {name} --stages {stages or 4} --microbatches {microbatches or 8}",
        )
    try:
        return generate(name, num_stages=stages, num_microbatches=microbatches, num_chunks=chunks)
    except ScheduleError as error:
        raise _located(error, f"{COMMAND_LINE}, {name}") from None


def _read(path: Path) -> Schedule:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(
            f"can't read {path}: {reason}",
            where=str(path),
            rule="a table file has the format of --csv or --json",
            fix=A_TABLE,
        ) from None
    try:
        if path.suffix == ".json":
            schedule = Schedule.from_json(text, where=str(path))
        else:
            schedule = Schedule.from_csv(text, where=str(path), kind=path.stem)
    except ScheduleError as error:
        raise _located(error, error.where) from None
    try:
        verify(schedule)
    except ScheduleError as error:
        raise _located(error, f"{path}, {error.where}" if error.where else str(path)) from None
    return schedule


def _located(error: ScheduleError, where: str) -> ScheduleError:
    return ScheduleError(error.what, where=where, rule=error.rule, fix=error.fix or A_TABLE)
