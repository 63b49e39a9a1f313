"""Compose the report of one or several runs as one HTML page. Torch-free.

The page loads nothing, runs no script, and follows the reader's color scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata, resources
from pathlib import Path

from meshwright.errors import InputError
from meshwright.train.report import compare, measured_sections, sections
from meshwright.train.report.html import Html, Section, element, text
from meshwright.train.report.run_data import RunData, read_run
from meshwright.units import counted

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
    compared = [compare.results(runs), compare.keys(runs), compare.curves(runs)]
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
