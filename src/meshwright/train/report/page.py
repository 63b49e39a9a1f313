"""Compose the report of one or several runs as one HTML page.

The page loads nothing, runs no script, and follows the reader's color scheme.

Several runs are compared by their results, the keys that differ, and their curves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata, resources
from pathlib import Path

from meshwright.errors import InputError
from meshwright.settings.violation import format_value
from meshwright.train.record.loss_curves import Curve, differences, differing_keys, run_names
from meshwright.train.report import measured_sections, sections
from meshwright.train.report.html import Html, Section, element, text
from meshwright.train.report.run_data import RunData, read_run
from meshwright.train.report.sections import headline
from meshwright.train.report.svg import Line, chart
from meshwright.units import counted, format_bytes

SECTIONS: tuple[Callable[[RunData, str], Section | None], ...] = (
    sections.what_ran,
    sections.curves,
    measured_sections.time_of_step,
    measured_sections.timelines,
    measured_sections.memory,
    measured_sections.traffic,
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
    if twice := next((folder for i, folder in enumerate(folders) if folder.resolve() in _resolved(folders[:i])), None):
        raise InputError(
            f"{twice} is given twice",
            where="command line, RUN",
            rule="a report compares different runs",
            fix="each run once",
        )
    runs = [read_run(folder) for folder in folders]
    if len(runs) == 1:
        run = runs[0]
        return _page(run.name, str(run.folder), _facts(run), _sections(run, ""))
    compared = [results(runs), keys(runs), curves(runs)]
    found = [section.html() for section in compared]
    links = _links([(section.id, section.title) for section in compared])
    for i, run in enumerate(runs, start=1):
        heading = element("h2", element("a", text(f"Run {i}: {run.name}"), href=f"#run-{i}"))
        folder = element("p", text(run.folder), class_="folder")
        links = Html(links + element("li", element("a", text(f"Run {i}"), href=f"#run-{i}")))
        inner = (section.html() for section in _sections(run, f"run-{i}"))
        found.append(element("article", heading, folder, _facts(run), *inner, id=f"run-{i}"))
    return _document(f"{counted(len(runs), 'run')}", "compared with the first", Html(""), links, found)


def _sections(run: RunData, prefix: str) -> list[Section]:
    return [section for make in SECTIONS if (section := make(run, prefix)) is not None]


def _page(title: str, under: str, facts: Html, found: Sequence[Section]) -> str:
    links = _links([(section.id, section.title) for section in found])
    return _document(title, under, facts, links, [section.html() for section in found])


def _facts(run: RunData) -> Html:
    pairs = (element("div", element("dt", text(name)), element("dd", text(value)))
             for name, value in sections.headline(run))  # fmt: skip
    return element("dl", *pairs, class_="facts")


def _links(found: Sequence[tuple[str, str]]) -> Html:
    return Html("".join(element("li", element("a", text(title), href=f"#{name}")) for name, title in found))


def _version() -> str:
    try:
        return metadata.version("meshwright")
    except metadata.PackageNotFoundError:
        return "from a source tree"


def _document(title: str, under: str, facts: Html, links: Html, found: Sequence[Html]) -> str:
    style = resources.files("meshwright.train.report").joinpath("style.css").read_text("utf-8")
    head = element(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        element("title", text(f"{title} · Meshwright")),
        element("style", Html(style)),
    )
    header = element("header", element("h1", text(title)), element("p", text(under), class_="folder"), facts)
    contents = element("nav", element("ul", links), aria_label="contents")
    footer = element("footer", element("p", text(f"Made by Meshwright {_version()}.")))
    body = element("body", header, contents, element("main", *found), footer)
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'


def _resolved(folders: Sequence[Path]) -> list[Path]:
    return [folder.resolve() for folder in folders]


NOT_SHOWN = ("name",)
MAX_WINDOW = 20
"""Most steps over which differences of losses are averaged; a tenth of the shortest run if that is less."""


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
        link = element("a", text(differs), href=f"#run-{i}")
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
        section.add(chart([Line(label, run.series(key)) for run, label in alike], title="Training loss", y=unit))
        validation = [Line(label, run.series(f"validation_{key}"), markers=True) for run, label in alike]
        section.add(chart(validation, title="Validation loss", y=unit))
        if len(alike) > 1:
            section.add(_differences(alike, key))
    small = [
        chart([Line(label, run.series(metric)) for run, label in named], title=title, y=y, floor=0.0)
        for metric, title, y in (("tokens_per_s", "Speed", "tokens/s"), ("lr", "Learning rate", "learning rate"))
    ]
    return section.add(element("div", *small, class_="small"))


def _differences(named: Sequence[tuple[RunData, str]], key: str) -> Html:
    """Draw the relative differences of the losses from those of the first run, at common steps."""
    found = [
        Curve(label, tuple(int(x) for x, _ in points), tuple(y for _, y in points), None, run.unit)
        for run, label in named
        if (points := run.series(key))
    ]
    window = max(1, min(MAX_WINDOW, min(len(curve.steps) for curve in found) // 10))
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
