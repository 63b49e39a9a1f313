"""Sections of a run's report: what ran, curves, what was predicted and measured, samples, checkpoints and messages."""

from __future__ import annotations

import base64
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.cluster.presets import cluster_of_device
from meshwright.errors import ConfigError
from meshwright.pipeline.timeline import from_values
from meshwright.plan.compare import hashes
from meshwright.plan.memory import predict_memory
from meshwright.plan.time.step_time import predict_step
from meshwright.plan.traffic import LinkBytes, predict_traffic
from meshwright.settings.violation import format_value
from meshwright.train.record.step_parts import StepParts
from meshwright.train.report.comparison import (
    PARTS,
    MeasuredRun,
    as_rows,
    compare_memory,
    compare_time,
    format_difference,
    memory_name,
)
from meshwright.train.report.figures import MAX_LANES, SMALL, Image, Line, bars, chart, interval, timeline_figure
from meshwright.train.report.run_data import RunData
from meshwright.units import counted, format_bytes, format_count, format_duration

CODE = Markup("<code>{}</code>")
MAX_IMAGES, MAX_IMAGE_BYTES = 4, 2 * 1024**2
MAX_LOG_LINES = 200
"""Most lines of a rank's log that are shown, the last ones."""
MAX_STAGES = 64
OUTCOMES = {"complete": "complete", "stopped": "stopped as requested", "failed": "failed"}
MAX_BARS = 8
"""Most ranks with a bar of their own; of more, the fastest, median and slowest in computing are shown."""
NO_MEASUREMENT = (
    "Not measured: the run has not ended or it failed, or the steps to measure were profiled or captured graphs."
)


class Section:
    """A section of a page; its identifiers start with `prefix`, so that a page may have those of several runs."""

    def __init__(self, title: str, *, prefix: str = "") -> None:
        self.title = title
        self.id = _slug(f"{prefix}-{title}")
        self.parts: list[dict[str, Any]] = []
        self._anchors: Counter[str] = Counter()

    def add(self, kind: str, **fields: Any) -> Section:
        """Append a part of a kind that the page's template knows, and return the section."""
        self.parts.append({"kind": kind, **{name.rstrip("_"): value for name, value in fields.items()}})
        return self

    def paragraph(self, words: str) -> Section:
        """Append a paragraph of plain text."""
        return self.add("paragraph", text=words)

    def figures(self, *images: Image | None) -> Section:
        """Append figures beside each other, without those that are None."""
        found = [image for image in images if image is not None]
        return self.add("figures", images=found) if found else self

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "") -> Section:
        """Append a table; the first cell of a row heads it and is a link to it. Numbers are aligned right.

        Args:
            header: headings of the columns.
            rows: cells of each row; `Markup` is taken as it is.
            caption: what the table shows, for screen readers.
        """
        found = [[cell if isinstance(cell, str) else str(cell) for cell in row] for row in rows]
        are_numbers = [all(re.match(r"[-+−–]?\d|–?$", row[i]) for row in found) for i in range(len(header))]
        classes = [Markup(' class="number"') if is_number else "" for is_number in are_numbers]
        anchored = [(self._anchor(row[0]), row) for row in found]
        return self.add("table", header=header, rows=anchored, classes_=classes, caption=caption or self.title)

    def _anchor(self, head: str) -> str:
        anchor = f"{self.id}-{_slug(re.sub('<[^>]*>', '', head))}"
        self._anchors[anchor] += 1
        times = self._anchors[anchor]
        return anchor if times == 1 else f"{anchor}-again-{times}"  # a resumed run may save a step again


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def headline(run: RunData) -> list[tuple[str, str]]:
    """Return the label and the value of the facts that a person looks for first."""
    unit, last = f" {run.unit}" if run.unit else "", run.steps[-1]["step"] if run.steps else 0
    facts = [("outcome", outcome(run)), ("steps", f"{last} of {run.config['train.steps']}")]
    if validation := run.series(f"validation_{run.loss}"):
        facts.append(("validation loss", f"{validation[-1][1]:.4f}{unit}"))
    elif losses := run.series(run.loss):
        facts.append(("training loss", f"{losses[-1][1]:.4f}{unit}"))
    if speeds := [speed for _, speed in run.series("tokens_per_s")]:
        facts.append(("median speed", f"{format_count(statistics.median(speeds))} tokens/s"))
    if end := run.end:
        steps = run.last_event("counted") if end["outcome"] == "complete" else None  # the terminal's figure
        facts.append(("time", format_duration((steps or {}).get("seconds", end["seconds"]))))
    return facts


def outcome(run: RunData) -> str:
    """Return how the run ended, in words."""
    if run.end is not None:
        return OUTCOMES.get(run.end["outcome"], str(run.end["outcome"]))
    if run.events:
        return "not ended: it still runs, or was killed"
    return "unknown: no events.jsonl"


def what_ran(run: RunData, prefix: str) -> Section:
    """Return the section on the command, the machine and the versions."""
    section = Section("What ran", prefix=prefix)
    start = run.last_event("start") or {}
    if run.end is not None and run.end["message"]:
        section.add("text", text=run.end["message"], class_="message")
    rows: list[tuple[str, object]] = [
        ("repeat it", CODE.format(f"meshwright run {shlex.quote(str(run.folder / 'config.toml'))}"))
    ]
    if start:
        rows += [
            ("data", start["corpus"]),
            ("parameters", format_count(start["num_params"])),
            ("layout", f"{start['mesh']}, {counted(start['num_ranks'], 'rank')}"),
            ("batch", f"{start['global_batch']} × {start['seq_len']} tokens"),
            ("device", start["device"] + (f", {start['backend']}" if start["backend"] else "")),
            ("host", start["host"]),
            ("versions", ", ".join(f"{name} {found}" for name, found in start["versions"].items())),
        ]
    for i, event in enumerate(run.all_events("start"), start=1):
        after = f", after step {event['after_step']}" if event["after_step"] else ""
        rows.append((f"attempt {i}", f"started {event['time'].replace('T', ' ')}{after}"))
    section.table(("what", "value"), rows, caption="The run")
    if run.plan is not None:
        found = hashes(run.plan)
        section.table(
            ("plan", "value"),
            [
                ("fingerprint", CODE.format(found.fingerprint)),
                ("model hash", CODE.format(found.model)),
                ("layout hash", CODE.format(found.layout)),
                ("schedule", f"{run.plan.schedule.kind}, {counted(run.plan.schedule.num_microbatches, 'micro-batch')}"),
                ("masters, compute", f"{run.plan.masters}, {run.plan.stages[0].root.compute}"),
            ],
            caption="The plan",
        )
    return section


def stages(run: RunData, prefix: str) -> Section | None:
    """Return the section on the pipeline stages, if there are several."""
    if run.plan is None or len(run.plan.stages) == 1:
        return None
    plan = run.plan
    rows = [
        (
            f"stage {i}",
            stage.pp_rank,
            f"{stage.layers[0]}–{stage.layers[1] - 1}" if stage.layers[1] > stage.layers[0] else "none",
            format_count(sum(plan.elements(parameter) for _, _, parameter in plan.parameters(stage))),
            " ".join((*stage.before, *stage.after)) or "–",
        )
        for i, stage in enumerate(plan.stages[:MAX_STAGES])
    ]
    section = Section("Stages", prefix=prefix)
    section.table(("stage", "pp rank", "layers", "parameters per tp rank", "with"), rows)
    return section if len(plan.stages) <= MAX_STAGES else section.paragraph(f"… of {len(plan.stages)} stages")


def configuration(run: RunData, prefix: str) -> Section:
    """Return the section on the configuration, against its preset."""
    section = Section("Configuration", prefix=prefix)
    if run.preset:
        rows = []
        for key in sorted((run.config.keys() | run.preset.keys()) - {"name"}):
            values = [config.get(key) for config in (run.preset, run.config)]
            if values[0] != values[1]:
                rows.append((key, *("–" if value is None else format_value(value) for value in values)))
        section.paragraph(
            f"{counted(len(rows), 'key')} with another value than in the preset {run.name}."
            if rows
            else f"All keys as in the preset {run.name}."
        )
        if rows:
            section.table(("key", "preset", "this run"), rows, caption="Keys that differ from the preset")
    else:
        section.paragraph(f"{run.name} is not a preset; all keys are below.")
    return section.add("details", title="config.toml", text=run.toml)


def curves(run: RunData, prefix: str) -> Section | None:
    """Return the section with the curves of the metrics."""
    losses = run.series(run.loss)
    if not losses:
        return None
    section = Section("Curves", prefix=prefix)
    unit = run.unit or "loss"
    lines = [Line("training", losses), Line("validation", run.series(f"validation_{run.loss}"), markers=True)]
    section.figures(chart(lines, title="Loss", y=unit))
    loads = [(line["step"], line["expert_load"]) for line in run.steps if line.get("expert_load") is not None]
    largest = [(step, one["max_over_mean"]) for step, one in loads]
    section.figures(*(
        chart([Line(name, points)], title=title, y=y, floor=floor, width=SMALL)
        for name, points, title, y, floor in (
            ("learning rate", run.series("lr"), "Learning rate", "learning rate", 0.0),
            ("gradient norm", run.series("grad_norm"), "Gradient norm", "before clipping", 0.0),
            ("speed", run.series("tokens_per_s"), "Speed", "tokens/s", 0.0),
            ("largest load", largest, "Largest load of an expert", "× the mean of its layer", 1.0),
        )
    ))  # fmt: skip
    if (size := interval(losses)) > 1:
        section.paragraph(f"Each point is a mean over {size} steps.")
    return section


def samples(run: RunData, prefix: str) -> Section | None:
    """Return the section with the text or the images that the model generated."""
    section = Section("Samples", prefix=prefix)
    for event in run.all_events("sample")[-1:]:
        section.add("text", text=event["text"], class_="sample")
    for event in run.all_events("image")[-MAX_IMAGES:]:
        name = f"{event['name'].replace('_', ' ')} after step {event['step']}"
        data = _image(run.folder, Path(event["path"]))
        if data is None:
            section.paragraph(f"{name}: {event['path']} is missing or too large to show")
        else:
            section.add("sample", title=name, source=f"data:image/png;base64,{data}")
    return section if section.parts else None


def checkpoints(run: RunData, prefix: str) -> Section | None:
    """Return the section on the checkpoints that were saved."""
    rows = []
    for event in run.all_events("checkpoint"):
        path = run.folder / "checkpoints" / event["path"]
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else None
        rows.append((
            f"step {event['step']}",
            event["path"],
            "removed since" if size is None else format_bytes(size),
            format_duration(event["seconds"]),
            event["time"].replace("T", " "),
        ))  # fmt: skip
    header = ("checkpoint", "folder", "size", "saved in", "at")
    return Section("Checkpoints", prefix=prefix).table(header, rows) if rows else None


def messages(run: RunData, prefix: str) -> Section:
    """Return the section with warnings, notes and the ranks' log files."""
    section = Section("Warnings and messages", prefix=prefix)
    skipped = [line["step"] for line in run.steps if line.get("skipped")]
    if skipped:
        shown = ", ".join(map(str, skipped[:20])) + (" …" if len(skipped) > 20 else "")
        section.paragraph(f"{counted(len(skipped), 'step')} not finite and skipped: {shown}.")
    notes = [event["text"] for event in run.all_events("note")]
    for note in dict.fromkeys(notes):
        section.paragraph(note)
    for name, content in run.logs():
        lines = content.splitlines()
        shown = "\n".join(lines[-MAX_LOG_LINES:])
        more = f" (the last {MAX_LOG_LINES} of {len(lines)} lines)" if len(lines) > MAX_LOG_LINES else ""
        section.add("details", title=f"{name}{more}", text=shown)
    if not (skipped or notes or any(run.logs())):
        section.paragraph("None.")
    return section


def _image(folder: Path, path: Path) -> str | None:
    """Return an image of the run folder in base64; a folder that was moved still has it."""
    for found in (folder / path.parent.name / path.name, path):
        with suppress(OSError):
            data = found.read_bytes()
            return base64.b64encode(data).decode("ascii") if len(data) <= MAX_IMAGE_BYTES else None
    return None


def start(run: RunData, prefix: str) -> Section | None:
    """Return the section on the time until the first step had ended, in the last attempt that got there."""
    event = run.last_event("under way")
    if event is None:
        return None
    ranks = event["ranks"]
    section, totals = Section("Start", prefix=prefix), [sum(rank.values()) for rank in ranks]
    later = ""
    if run.measured is not None:
        later = f"; a later one takes {statistics.fmean(sum(parts.values()) for parts in run.measured['parts']):.3g} s"
    section.paragraph(f"The first step had ended after {max(totals):.3g} s{later}.")
    times = {phase: [rank.get(phase, 0.0) for rank in ranks] for rank in ranks for phase in rank}
    table = [
        (phase, *(f"{value(seconds):.3g}" for value in (statistics.fmean, min, max)))
        for phase, seconds in {**times, "all": totals}.items()
    ]
    return section.table(("phase", "mean, s", "fastest rank, s", "slowest rank, s"), table)


def time_of_step(run: RunData, prefix: str) -> Section:
    """Return the section on where a step's time went, and its timeline."""
    section = Section("Where a step's time went", prefix=prefix)
    found = run.measured
    if found is None:
        return section.paragraph(NO_MEASUREMENT)
    ranks = [StepParts(**parts) for parts in found["parts"]]
    steps = found["steps"]
    section.paragraph(
        f"Mean over {counted(len(steps), 'measured step')}: {', '.join(map(str, steps))}. Measuring took "
        f"{1000 * found['cost_s']:.2g} ms in all, {found['cost_s'] / found['steps_s']:.2%} of the time of all steps."
    )
    rows = {label: [1000 * getattr(parts, name) for name in PARTS] for label, parts in _shown_ranks(ranks)}
    title = "Time of a step in milliseconds, by rank"
    section.figures(bars(rows, list(PARTS.values()), title=title, unit="ms"))
    times = {part: [getattr(parts, name) for parts in ranks] for name, part in PARTS.items()}
    total = sum(sum(seconds) for seconds in times.values()) or 1.0
    table = [
        (
            part,
            *(f"{1000 * value(seconds):.3g}" for value in (statistics.fmean, min, max)),
            f"{sum(seconds) / total:.1%}",
        )
        for part, seconds in times.items()
    ]
    section.table(("part", "mean, ms", "fastest rank, ms", "slowest rank, ms", "share"), table)
    if run.device != "cpu":
        section.paragraph("On a GPU, communication inside blocks counts as forward and backward.")
    return section


def predicted_time(run: RunData, prefix: str) -> Section | None:
    """Return the section on the time of a step, predicted against measured by part."""
    if run.plan is None or run.measured is None:
        return None
    section, found = Section("Predicted time of a step", prefix=prefix), MeasuredRun.of(run)
    try:
        cluster = cluster_of_device(found.device)
        if cluster is None:
            return section.paragraph(f"Not predicted: no preset has a {run.device}; meshwright calibrate measures it.")
        time = predict_step(found.plan, cluster, captured=found.captured)
    except ConfigError as error:
        return section.paragraph(f"Not predicted: {error.what}.")
    ends = " to ".join(f"{us / 1e3:.3g}" for us in (time.low, time.high))
    section.paragraph(f"Expected from {ends} ms on {cluster.name}, with rates of {cluster.performance.source}.")
    rows = as_rows(
        compare_time(time, found.ranks, on_cpu=found.device == "cpu"), lambda seconds: f"{1000 * seconds:.3g} ms"
    )
    return section.table(("part", "predicted", "measured", "difference"), rows)


def timelines(run: RunData, prefix: str) -> Section | None:
    """Return the section with the last measured step's timeline, predicted over measured."""
    found = run.measured
    if found is None:
        return None
    both = from_values(found["timeline"])
    predicted, measured = both["predicted"], both["measured"]
    section = Section("Timeline of a step", prefix=prefix)
    section.paragraph(
        f"Step {found['steps'][-1]}: predicted {1000 * predicted.makespan:.3g} ms from the measured times of "
        f"computations with transfers that take no time, measured {1000 * measured.makespan:.3g} ms."
    )
    section.figures(timeline_figure(both, title="Computations of a step, predicted over measured"))
    if predicted.num_ranks > MAX_LANES:
        section.paragraph(f"The first {MAX_LANES} of {predicted.num_ranks} pipeline ranks.")
    return section


def memory(run: RunData, prefix: str) -> Section | None:
    """Return the section on memory, predicted against measured by type."""
    if run.plan is None:
        return None
    predicted = predict_memory(run.plan)
    section = Section("Memory of a rank", prefix=prefix)
    found = run.measured
    if found is None:
        rows = [(memory_name(name), format_bytes(size)) for name, size in vars(predicted).items() if size]
        section.paragraph("Predicted, of the rank with the most; not measured.")
        return section.table(("type", "predicted"), [*rows, ("total", format_bytes(predicted.total()))])
    rank = max(range(len(found["memory"])), key=lambda rank: found["memory"][rank]["peak"])
    section.paragraph(f"Predicted for the rank with the most, measured on rank {rank}, which held the most.")
    on_cpu = run.device == "cpu"
    compared = as_rows(compare_memory(run.plan, found["memory"][rank], on_cpu=on_cpu), format_bytes)
    return section.table(("type", "predicted", "measured", "difference"), compared)


def traffic(run: RunData, prefix: str) -> Section | None:
    """Return the section on bytes sent, by purpose and link, predicted against counted."""
    if run.plan is None:
        return None
    section = Section("Bytes that a rank sends per step", prefix=prefix)
    predicted, found = predict_traffic(run.plan), run.measured
    if not predicted.entries:
        return section.paragraph("None: there is one rank.")
    if found is None or found["sent"] is None:
        rows = [(f"{one.purpose}, {link}", format_bytes(size)) for one in predicted.entries
                for link, size in _by_link(one.sent).items() if size]  # fmt: skip
        section.paragraph(f"Predicted for rank {predicted.rank}, which sends the most; not counted.")
        return section.table(("purpose", "predicted"), rows)
    section.paragraph(f"Rank {found['sent_by']}, which sends the most; counted in step {found['steps'][-1]}.")
    entries = [
        (" and ".join(one["purposes"]), LinkBytes(**one["predicted"]), LinkBytes(**one["counted"]))
        for one in found["sent"]
    ]
    total = sum((one for _, one, _ in entries), LinkBytes()), sum((one for _, _, one in entries), LinkBytes())
    compared = [row for entry in (*entries, ("total", *total)) for row in _compared_links(*entry)]
    section.table(("purpose", "predicted", "counted", "difference"), compared)
    for event in run.all_events("counted")[-1:]:
        steps = counted(event["steps"], "step")
        for one in event["all_to_alls"]:
            known = f", from the {one['basis']} {format_bytes(one['explained'])}" if one["basis"] else ""
            section.paragraph(
                f"All-to-alls of {one['purpose']} on rank 0, in {steps}: {format_bytes(one['sent'])}, "
                f"predicted {format_bytes(one['predicted'])}{known}."
            )
    return section


def _by_link(one: LinkBytes) -> dict[str, int]:
    return {"inside a node": one.inside_node, "between nodes": one.between_nodes}


def _compared_links(name: str, predicted: LinkBytes, found: LinkBytes) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each kind of link that is used."""
    for (link, one), other in zip(_by_link(predicted).items(), _by_link(found).values(), strict=True):
        if one or other:
            written = format_bytes(other)
            yield f"{name}, {link}", format_bytes(one), written, format_difference(one, other, written)


def _shown_ranks(ranks: Sequence[StepParts]) -> list[tuple[str, StepParts]]:
    named = [(f"rank {rank}", parts) for rank, parts in enumerate(ranks)]
    if len(ranks) <= MAX_BARS:
        return named
    named.sort(key=lambda one: one[1].compute)
    places = {"fastest": 0, "median": len(named) // 2, "slowest": len(named) - 1}
    return [(f"{word}, {named[place][0]}", named[place][1]) for word, place in places.items()]
