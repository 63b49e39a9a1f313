"""Sections of a run's report: what ran, curves, samples, checkpoints and messages."""

from __future__ import annotations

import base64
import shlex
import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.plan.compare import hashes
from meshwright.settings.violation import format_value
from meshwright.train.report.html import Section, element, text
from meshwright.train.report.run_data import RunData
from meshwright.train.report.svg import Line, chart, interval
from meshwright.units import counted, format_bytes, format_count, format_duration

MAX_IMAGES, MAX_IMAGE_BYTES = 4, 2 * 1024**2
MAX_LOG_LINES = 200
"""Most lines of a rank's log that are shown, the last ones."""
MAX_STAGES = 64
OUTCOMES = {"complete": "complete", "stopped": "stopped as requested", "failed": "failed"}


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
        section.add(element("pre", text(run.end["message"]), class_="message"))
    rows: list[tuple[str, object]] = [("repeat it", element("code", text(_repeat(run))))]
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
    rows += [(f"attempt {i}", _attempt(event)) for i, event in enumerate(run.all_events("start"), 1)]
    section.table(("what", "value"), rows, caption="The run")
    if run.plan is not None:
        found = hashes(run.plan)
        section.table(
            ("plan", "value"),
            [
                ("fingerprint", element("code", text(found.fingerprint))),
                ("model hash", element("code", text(found.model))),
                ("layout hash", element("code", text(found.layout))),
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
        keys = sorted(key for key in run.config.keys() | run.preset.keys() if _differs(run, key))
        rows = [(key, _value(run.preset.get(key)), _value(run.config.get(key))) for key in keys]
        section.paragraph(
            f"{counted(len(rows), 'key')} with another value than in the preset {run.name}."
            if rows
            else f"All keys as in the preset {run.name}."
        )
        if rows:
            section.table(("key", "preset", "this run"), rows, caption="Keys that differ from the preset")
    else:
        section.paragraph(f"{run.name} is not a preset; all keys are below.")
    whole = element("details", element("summary", text("config.toml")), element("pre", text(run.toml)))
    return section.add(whole)


def curves(run: RunData, prefix: str) -> Section | None:
    """Return the section with the curves of the metrics."""
    losses = run.series(run.loss)
    if not losses:
        return None
    section = Section("Curves", prefix=prefix)
    unit = run.unit or "loss"
    lines = [Line("training", losses), Line("validation", run.series(f"validation_{run.loss}"), markers=True)]
    section.add(chart(lines, title="Loss", y=unit))
    loads = [(line["step"], line["expert_load"]) for line in run.steps if line.get("expert_load") is not None]
    small = [
        chart([Line("learning rate", run.series("lr"))], title="Learning rate", y="learning rate", floor=0.0),
        chart([Line("gradient norm", run.series("grad_norm"))], title="Gradient norm", y="before clipping", floor=0.0),
        chart([Line("speed", run.series("tokens_per_s"))], title="Speed", y="tokens/s", floor=0.0),
        chart([Line("largest load", [(step, one["max_over_mean"]) for step, one in loads])],
              title="Largest load of an expert", y="× the mean of its layer", floor=1.0),
    ]  # fmt: skip
    section.add(element("div", *small, class_="small"))
    if (size := interval(losses)) > 1:
        section.paragraph(f"Each point is a mean over {size} steps.")
    return section


def samples(run: RunData, prefix: str) -> Section | None:
    """Return the section with the text or the images that the model generated."""
    section, parts = Section("Samples", prefix=prefix), []
    for event in run.all_events("sample")[-1:]:
        parts.append(element("pre", text(event["text"]), class_="sample"))
    for event in run.all_events("image")[-MAX_IMAGES:]:
        name = f"{event['name'].replace('_', ' ')} after step {event['step']}"
        data = _image(run.folder, Path(event["path"]))
        if data is None:
            parts.append(element("p", text(f"{name}: {event['path']} is missing or too large to show")))
            continue
        image = element("img", src=f"data:image/png;base64,{data}", alt=name)
        parts.append(element("figure", image, element("figcaption", text(name))))
    return section.add(*parts) if parts else None


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
    section.add(*(element("p", text(note)) for note in dict.fromkeys(notes)))
    for name, content in run.logs():
        lines = content.splitlines()
        shown = "\n".join(lines[-MAX_LOG_LINES:])
        more = f" (the last {MAX_LOG_LINES} of {len(lines)} lines)" if len(lines) > MAX_LOG_LINES else ""
        section.add(element("details", element("summary", text(f"{name}{more}")), element("pre", text(shown))))
    if not (skipped or notes or any(run.logs())):
        section.paragraph("None.")
    return section


def _repeat(run: RunData) -> str:
    return f"meshwright run {shlex.quote(str(run.folder / 'config.toml'))}"


def _attempt(event: Mapping[str, Any]) -> str:
    after = f", after step {event['after_step']}" if event["after_step"] else ""
    return f"started {event['time'].replace('T', ' ')}{after}"


def _differs(run: RunData, key: str) -> bool:
    one, other = (config.get(key) for config in (run.config, run.preset))
    return key != "name" and one != other


def _value(value: object) -> str:
    return "–" if value is None else format_value(value)


def _image(folder: Path, path: Path) -> str | None:
    """Return an image of the run folder in base64; a folder that was moved still has it."""
    for found in _places(folder, path):
        with suppress(OSError):
            data = found.read_bytes()
            return base64.b64encode(data).decode("ascii") if len(data) <= MAX_IMAGE_BYTES else None
    return None


def _places(folder: Path, path: Path) -> Iterator[Path]:
    yield folder / path.parent.name / path.name
    yield path
