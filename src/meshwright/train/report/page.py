"""The report of one or several runs as one HTML page, which several runs begin with a comparison.

The page loads nothing, runs no script, and follows the reader's color scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from meshwright.errors import InputError
from meshwright.settings.violation import format_value
from meshwright.train.record.loss_curves import Curve, default_window, differences, differing_keys, run_names
from meshwright.train.report import sections
from meshwright.train.report.figures import SMALL, Image, Line, chart
from meshwright.train.report.run_data import RunData, read_run
from meshwright.train.report.sections import Section, headline
from meshwright.units import counted, format_bytes

SECTIONS: tuple[Callable[[RunData, str], Section | None], ...] = (
    sections.what_ran,
    sections.start,
    sections.curves,
    sections.time_of_step,
    sections.predicted_time,
    sections.timelines,
    sections.memory,
    sections.traffic,
    sections.stages,
    sections.samples,
    sections.checkpoints,
    sections.messages,
    sections.configuration,
)


def report(folders: Sequence[Path]) -> str:
    """Return the page on the runs in these folders; of several runs, it compares them first.

    Raises:
        InputError: a folder is not a run folder, is given twice, or its metrics are damaged.
    """
    resolved = [folder.resolve() for folder in folders]
    if twice := next((folder for i, folder in enumerate(folders) if resolved[i] in resolved[:i]), None):
        raise InputError(
            f"{twice} is given twice",
            where="command line, RUN",
            rule="a report compares different runs",
            fix="each run once",
        )
    runs = [read_run(folder) for folder in folders]
    if len(runs) == 1:
        [run] = runs
        return _render(title=run.name, under=run.folder, facts=headline(run), sections=_sections(run, ""), runs=())
    each = [
        {"name": run.name, "folder": run.folder, "facts": headline(run), "sections": _sections(run, f"run-{i}")}
        for i, run in enumerate(runs, start=1)
    ]
    compared = [results(runs), keys(runs), curves(runs)]
    title = counted(len(runs), "run")
    return _render(title=title, under="compared with the first", facts=(), sections=compared, runs=each)


def _sections(run: RunData, prefix: str) -> list[Section]:
    return [section for make in SECTIONS if (section := make(run, prefix)) is not None]


def _render(**content: Any) -> str:
    try:
        version = metadata.version("meshwright")
    except metadata.PackageNotFoundError:
        version = "from a source tree"
    files = resources.files("meshwright.train.report")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        files.joinpath("page.html").read_text("utf-8")
    )
    style = Markup(files.joinpath("style.css").read_text("utf-8"))
    return template.render(style=style, version=version, **content)


NOT_SHOWN = ("name",)


def labels(runs: Sequence[RunData]) -> list[str]:
    """Return a label for each run: its number, and what differs."""
    names = run_names([run.folder for run in runs], [run.config for run in runs])
    return [f"run\u00a0{i}: {name}" for i, name in enumerate(names, start=1)]


def results(runs: Sequence[RunData]) -> Section:
    """Return the section with a line for each run."""
    section = Section("Results")
    names = dict.fromkeys(name for run in runs for name, _ in headline(run))
    rows = []
    for i, (run, label) in enumerate(zip(runs, labels(runs), strict=True), start=1):
        facts = dict(headline(run))
        head, _, differs = label.partition(": ")
        link = Markup('<a href="#run-{}">{}</a>').format(i, differs)
        rows.append((head, link, *(facts.get(name, "–") for name in names), _memory(run)))
    return section.table(("run", "what differs", *names, "peak memory"), rows)


def keys(runs: Sequence[RunData]) -> Section:
    """Return the section with the keys that differ."""
    section = Section("Keys that differ")
    found = [key for key in differing_keys([run.config for run in runs]) if key not in NOT_SHOWN]
    if not found:
        return section.paragraph("None: the runs have the same configuration.")
    header = ("key", *(f"run\u00a0{i}" for i in range(1, len(runs) + 1)))
    rows = [(key, *(format_value(run.config[key]) if key in run.config else "–" for run in runs)) for key in found]
    return section.table(header, rows)


def curves(runs: Sequence[RunData]) -> Section:
    """Return the section with the curves of all runs; losses in different units have a figure for each unit."""
    section, named = Section("Curves"), list(zip(runs, labels(runs), strict=True))
    for key in dict.fromkeys(run.loss for run in runs if run.steps):
        alike = [(run, label) for run, label in named if run.loss == key]
        unit = alike[0][0].unit or "loss"
        section.figures(chart([Line(label, run.series(key)) for run, label in alike], title="Training loss", y=unit))
        validation = [Line(label, run.series(f"validation_{key}"), markers=True) for run, label in alike]
        section.figures(chart(validation, title="Validation loss", y=unit))
        if len(alike) > 1:
            section.figures(_differences(alike, key))
    return section.figures(*(
        chart([Line(label, run.series(metric)) for run, label in named], title=title, y=y, floor=0.0, width=SMALL)
        for metric, title, y in (("tokens_per_s", "Speed", "tokens/s"), ("lr", "Learning rate", "learning rate"))
    ))  # fmt: skip


def _differences(named: Sequence[tuple[RunData, str]], key: str) -> Image | None:
    """Draw the relative differences of the losses from those of the first run, at common steps."""
    found = [
        Curve(label, tuple(int(x) for x, _ in points), tuple(y for _, y in points), None, run.unit)
        for run, label in named
        if (points := run.series(key))
    ]
    window = default_window(found)
    lines = [Line(found[0].name, [(step, 0.0) for step in found[0].steps])]
    for curve in found[1:]:
        steps, apart = differences(curve, found[0], window=window)
        lines.append(Line(curve.name, [(step, 100 * value) for step, value in zip(steps, apart, strict=True)]))
    mean = f", mean of {window} steps" if window > 1 else ""
    return chart(lines, title=f"Training loss relative to the first run{mean}", y="%")


def _memory(run: RunData) -> str:
    found = run.measured
    peaks = [memory["peak"] for memory in found["memory"]] if found is not None else []
    if peaks:
        return format_bytes(max(peaks))
    sizes = [size for _, size in run.series("memory_bytes")]
    return format_bytes(max(sizes)) if sizes else "–"
