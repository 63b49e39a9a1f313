"""Prove many models on many layouts, with the same processes for case after case; outcomes as a file, as a table and as
a figure. Doesn't import torch."""

from __future__ import annotations

import json
import math
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import DataError, MeshwrightError, ModelError
from meshwright.figure import GREY, INK, save_figure
from meshwright.plan.make_plan import make_plan
from meshwright.prove.report import to_json as to_report
from meshwright.prove.spec import ProofSpec, as_proof
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RankContext
from meshwright.units import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Outcome(StrEnum):
    """Outcome of a case."""

    PROVED = "proved"
    WRONG = "not proved"
    FAILED = "failed"
    """A rank raised an error."""
    REFUSED = "refused"
    """A rule refused the layout before any process started."""
    NOT_BUILT = "not built"
    """The model has no small configuration, or doesn't run by itself."""


@dataclass(frozen=True)
class Case:
    """A model on a layout, ready to be proved."""

    model: str
    layout: str
    spec: ProofSpec

    @property
    def error(self) -> Path:
        """Path of the text of an error that a rank raised."""
        return self.spec.folder / "error.txt"

    def outcome(self) -> Result:
        """Return the outcome that the processes left in the case's folder."""
        if self.error.exists():
            return Result(self.model, self.layout, Outcome.FAILED, self.error.read_text("utf-8"))
        if not self.spec.result.exists():
            return Result(self.model, self.layout, Outcome.FAILED, "the processes ended without a result")
        result, loss_unit = self.spec.load_result()
        return Result.of(self, to_report(result, loss_unit=loss_unit))


@dataclass(frozen=True)
class Result:
    """Outcome of a case."""

    model: str
    layout: str
    outcome: Outcome
    reason: str = ""
    """Reason for a refusal, or the first finding or error."""

    @classmethod
    def of(cls, case: Case, report: dict[str, Any]) -> Result:
        """Return the outcome of a proof from its report."""
        passed, causes = report["passed"], [one["cause"] for one in report["causes"]]
        reason = "" if passed else next(iter([*causes, *report["evidence"]]), "the values differ")
        return cls(case.model, case.layout, Outcome.PROVED if passed else Outcome.WRONG, reason)


LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "dp_shard 2": ("mesh.dp_shard=2",),
    "pp 2": ("mesh.pp=2",),
    "tp 2": ("mesh.tp=2",),
    "ep 2": ("mesh.dp_shard=2", "mesh.ep=2"),
    "cp 2": ("mesh.cp=2",),
    "packed": ("mesh.dp_shard=2", "data.packing=documents", "data.text_field=text"),
    "all three": ("mesh.dp_shard=2", "mesh.pp=2", "mesh.tp=2"),
}
"""Keys of each layout."""
ALL, EP, PACKED = "all three", "ep 2", "packed"
SETTINGS = ("train.seq_len=32", "train.global_batch=8", "train.num_microbatches=2", "train.timeout_s=60")
"""Keys of every case: two micro-batches, since gradients that are reduced in every backward are right with one."""
NUM_DOCUMENTS = 400
"""Documents of which several fit into a sample."""


def write_documents(path: Path) -> None:
    """Write the short documents of packed cases."""
    texts = (f"{number} squared is {number * number}"[: 8 + number % 13] for number in range(NUM_DOCUMENTS))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")


MARKS = {Outcome.PROVED: "✓", Outcome.WRONG: "✗", Outcome.FAILED: "✗", Outcome.REFUSED: "–", Outcome.NOT_BUILT: ""}


def has_experts(make: Callable[[], RunConfig]) -> bool:
    """Return whether a model has experts, sharded over ep or refused with a reason; False for one that isn't built."""
    try:
        facts = model_facts(make())
    except MeshwrightError:
        return False
    return bool(facts.not_expert_parallel) or any(kind.experts is not None for kind in facts.kinds)


def table(results: Iterable[Result]) -> list[str]:
    """Return the catalogue as a table in Markdown: a row a model, with the reasons of what is not proved below."""
    rows: dict[str, dict[str, Result]] = {}
    for one in results:
        rows.setdefault(one.model, {})[one.layout] = one
    layouts = [name for name in LAYOUTS if any(name in row for row in rows.values())]
    lines = [f"| model | {' | '.join(layouts)} | why not |", f"|---|{':-:|' * len(layouts)}---|"]
    for model in sorted(rows):
        row = rows[model]
        marks = [MARKS[row[name].outcome] if name in row else "" for name in layouts]
        reasons = dict.fromkeys(first_line(row[name].reason) for name in layouts if name in row and row[name].reason)
        lines.append(f"| {model} | {' | '.join(marks)} | {'; '.join(reasons)} |")
    return lines


def first_line(text: str) -> str:
    """Return the first line of a reason, without what would end a cell."""
    return text.splitlines()[0].replace("|", "/")[:160] if text else ""


def counts(results: Sequence[Result]) -> list[str]:
    """Return a line per layout: how many models are proved of those that can be built, and how many are refused."""
    lines = []
    for layout in LAYOUTS:
        found = [one.outcome for one in results if one.layout == layout]
        if found:
            built = len(found) - found.count(Outcome.NOT_BUILT)
            proved, refused = found.count(Outcome.PROVED), found.count(Outcome.REFUSED)
            wrong = f", {built - proved - refused} not" if built > proved + refused else ""
            lines.append(f"{layout}: {proved} of {built} proved, {refused} refused{wrong}")
    return lines


BATCH_CASES = 40
"""Cases whose records are kept at a time."""
COMPARERS = 2
"""Processes that compare records with references."""

Say = Callable[[Result], None]


@dataclass(frozen=True)
class Batch:
    """Cases of one number of ranks, run one after the other by the same processes."""

    cases: tuple[Case, ...]


def prove_all(
    configs: Iterable[tuple[str, str, Callable[[], RunConfig]]], *, steps: int, say: Say, batch_cases: int = BATCH_CASES
) -> list[Result]:
    """Prove models on layouts in float64, and return the outcomes in the order of completion.

    Args:
        configs: name of the model, name of the layout, and a function that returns the configuration. An error that it
            raises is a refusal: no process starts for the case.
        steps: optimizer steps to compare.
        say: called with each outcome.
        batch_cases: cases whose records are kept at a time.
    """
    results: list[Result] = []

    def note(found: Iterable[Result]) -> None:
        for one in found:
            results.append(one)
            say(one)

    with tempfile.TemporaryDirectory(prefix="meshwright-catalogue-") as folder:
        waiting: dict[int, list[Case]] = {}
        for number, (model, layout, make) in enumerate(configs):
            try:
                config = as_proof(make())
                spec = ProofSpec(config, make_plan(config), steps, Path(folder, str(number)))
                config.family.open_data(run_facts(config))
            except MeshwrightError as error:
                outcome = Outcome.NOT_BUILT if isinstance(error, ModelError) else Outcome.REFUSED
                note([Result(model, layout, outcome, error.what)])
                continue
            spec.folder.mkdir()
            ranks = config.mesh.axes().num_ranks()
            waiting.setdefault(ranks, []).append(Case(model, layout, spec))
            if len(waiting[ranks]) == batch_cases:
                note(_prove_batch(waiting.pop(ranks), ranks))
        for ranks, cases in waiting.items():
            note(_prove_batch(cases, ranks))
    return results


def _prove_batch(cases: list[Case], num_ranks: int) -> Iterator[Result]:
    preload = tuple(dict.fromkeys(name for case in cases for name in case.spec.config.family.preload))
    left = list(cases)
    while left:
        try:
            launch(record_body, Batch(tuple(left)), num_ranks=num_ranks, threads=1, preload=preload)
            left = []
        except MeshwrightError as error:
            failed = next((n for n, case in enumerate(left) if not _is_recorded(case, num_ranks)), len(left) - 1)
            if not left[failed].error.exists():
                left[failed].error.write_text(error.what, "utf-8")
            left = left[failed + 1 :]
    recorded = [case for case in cases if not case.error.exists()]
    if recorded:
        launch(compare_body, Batch(tuple(recorded)), num_ranks=COMPARERS, threads=1, preload=preload)
    for case in cases:
        yield case.outcome()
        for path in case.spec.folder.iterdir():
            path.unlink()


def _is_recorded(case: Case, num_ranks: int) -> bool:
    return all((case.spec.folder / f"done-{rank}").exists() for rank in range(num_ranks))


def record_body(context: RankContext, batch: Batch) -> None:
    """Record cases as one rank. Imports torch here to keep the launcher torch-free."""

    record_cases(context, batch.cases)


def compare_body(context: RankContext, batch: Batch) -> None:
    """Compare cases with their references. Imports torch here to keep the launcher torch-free."""

    compare_cases(context, batch.cases)


PACKAGES = ("transformers", "torch")


@dataclass(frozen=True)
class Report:
    """Outcomes, with the versions of what was proved."""

    versions: dict[str, str]
    results: tuple[Result, ...]


def to_json(results: Iterable[Result]) -> str:
    """Return outcomes as JSON, each with the first line of its reason."""
    short = [Result(one.model, one.layout, one.outcome, first_line(one.reason)) for one in results]
    return json.dumps(asdict(Report({name: version(name) for name in PACKAGES}, tuple(short))), indent=1)


def read_report(path: Path) -> Report:
    """Return the outcomes in a file that `meshwright prove --catalogue --json` wrote.

    Raises:
        DataError: the file can't be read, or is no such file.
    """
    try:
        return TypeAdapter(Report).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(
            f"{path} has no outcomes of a catalogue: {str(error).splitlines()[0]}",
            where=str(path),
            rule="the file is what meshwright prove --catalogue --json writes",
            fix=f"meshwright prove --catalogue --json {path}",
        ) from error


def page(report: Report) -> str:
    """Return outcomes as a page in Markdown: how many are proved on each layout, and a table with the reasons."""
    versions = ", ".join(f"{name} {found}" for name, found in report.versions.items())
    lines = [
        "# The catalogue",
        "",
        "Written by `meshwright draw catalogue docs/catalogue.json --table docs/catalogue.md`, from what",
        f"`meshwright prove --catalogue --json docs/catalogue.json` found with {versions}:",
        "losses, gradients and parameters of two steps with two micro-batches, equal to those of one process to 1e-12.",
        "A layout is proved (✓), refused before a process starts (–), or not proved (✗); an empty cell was not run.",
        "",
        *(f"- {line}" for line in counts(report.results)),
        "",
        *table(report.results),
    ]
    return "\n".join(lines) + "\n"


def record_cases(context: RankContext, cases: Sequence[Case]) -> None:
    """Train as one rank of each layout. An error ends the process, since other ranks may wait for it; the caller starts
    others for the cases that are left."""
    from meshwright.prove import conclude

    for case in cases:
        store = Path(case.spec.folder, "store")
        try:
            conclude.record_layout(replace(context, store_path=str(store)), case.spec)
        except BaseException as error:
            if not case.error.exists():
                case.error.write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", "utf-8")
            raise
        (case.spec.folder / f"done-{context.rank}").touch()


def compare_cases(context: RankContext, cases: Sequence[Case]) -> None:
    """Compare this process's share of the cases with their references."""
    from meshwright.prove import conclude

    for case in cases[context.rank :: context.num_ranks]:
        try:
            conclude.compare_with_reference(context, case.spec)
        except Exception as error:
            case.error.write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", "utf-8")


COLUMNS = 5
ROW, TOP = 0.165, 1.15
"""Height of a row and of what is above the first, in inches."""
WIDTH = 11.0
COLORS = {
    Outcome.PROVED: (0.18, 0.40, 0.69),
    Outcome.REFUSED: (0.80, 0.82, 0.85),
    Outcome.WRONG: (0.78, 0.36, 0.11),
    Outcome.FAILED: (0.78, 0.36, 0.11),
}
LEGEND = {"proved": Outcome.PROVED, "refused, with the reason": Outcome.REFUSED, "not proved": Outcome.WRONG}


def draw_catalogue(report: Report, path: Path) -> None:
    """Save a .svg or .png figure.

    Raises:
        InputError: the figure cannot be written to `path`.
    """
    save_figure(lambda: _figure(report), path)


def _figure(report: Report) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    outcomes: dict[str, dict[str, Outcome]] = {}
    for one in report.results:
        outcomes.setdefault(one.model, {})[one.layout] = one.outcome
    models = sorted(name for name, found in outcomes.items() if set(found.values()) != {Outcome.NOT_BUILT})
    layouts = [name for name in LAYOUTS if any(name in found for found in outcomes.values())]
    rows = math.ceil(len(models) / COLUMNS)
    height = TOP + ROW * (rows + 1)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")

    def square(x: float, y: float, color: tuple[float, float, float]) -> None:
        axes.add_patch(Rectangle((x, y), 0.1, 0.1, facecolor=color, linewidth=0))

    versions = ", ".join(f"{name} {found}" for name, found in report.versions.items())
    title = f"{counted(len(models), 'causal language model')} of Hugging Face's transformers, built small"
    axes.text(0.2, 0.3, title, fontsize=12, fontweight="bold", color=INK, va="center")
    proved = " · ".join(line.partition(" proved")[0] for line in counts(report.results))
    squares = f"a square for each layout, none where it was not run ({versions}); proved are\n{proved}"
    axes.text(0.2, 0.63, squares, fontsize=9, color=GREY, va="center")
    x = 0.2
    for words, outcome in LEGEND.items():
        square(x, 0.88, COLORS[outcome])
        axes.text(x + 0.16, 0.935, words, fontsize=8.5, color=INK, va="center")
        x += 0.45 + 0.075 * len(words)
    for number, model in enumerate(models):
        column, row = divmod(number, rows)
        x, y = 0.2 + column * (WIDTH - 0.3) / COLUMNS, TOP + row * ROW
        for place, layout in enumerate(layouts):
            found = outcomes[model].get(layout)
            if found in COLORS:
                square(x + 0.13 * place, y, COLORS[found])
        axes.text(x + 0.13 * len(layouts) + 0.04, y + 0.055, model, fontsize=7.5, color=INK, va="center")
    return figure
