"""Run metrics: `metrics.jsonl`, with one object per step, the trackers, and the loss plot."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.models.contract.loss_unit import LossUnit
from meshwright.output_files import writing
from meshwright.plan.compare import hashes
from meshwright.plan.stage_sizes import experts_per_layer, load_rows
from meshwright.train.build_job import Job
from meshwright.train.measure.process_memory import memory_bytes
from meshwright.train.record.expert_load import Counts, has_full_counts, summarize_load
from meshwright.train.record.loss_curves import LOSS, read_metrics
from meshwright.train.record.reporter import Progress, Reporter, Validation
from meshwright.train.record.sink import RunInfo
from meshwright.train.record.trackers import Trackers
from meshwright.train.run_folder import RunFolder
from meshwright.train.train_step import StepResult

LOSS_FIGURE, LOAD_FIGURE = "loss.png", "expert-load.png"
LOSSES = (LOSS, f"validation_{LOSS}")


class MetricsFile:
    """Writer for a run's `metrics.jsonl`, flushed after every line.

    A resumed run drops the lines of steps that it repeats, so the file reads as if the run had never been interrupted.
    Losses that an earlier version wrote without a unit are converted to `unit`.
    """

    def __init__(self, path: Path, *, after_step: int, unit: LossUnit) -> None:
        lines = list(read_metrics(path)) if path.exists() else []
        kept = [in_unit(line, unit) for line in lines if line["step"] <= after_step]
        self.recorded_step: int = max((line["step"] for line in lines), default=0)
        """Last step in the file before lines were dropped."""
        self._path = path
        temporary = path.with_suffix(".tmp")
        with writing(path):
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
            os.replace(temporary, path)
            self._file = path.open("a", encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        """Append a step's object; non-finite values become null, since JSON has no NaN."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with writing(self._path):
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Recorder:
    """Recorder on rank 0 that writes each step's metrics and updates the reporter."""

    def __init__(self, job: Job, folder: RunFolder, reporter: Reporter, *, unit: LossUnit, done: int) -> None:
        self._job = job
        self._unit = unit
        self._reporter = reporter
        self._done = done
        self._started = time.perf_counter()
        self._file = MetricsFile(folder.metrics, after_step=done, unit=unit)
        run = RunInfo(
            name=job.config.name,
            folder=folder.path,
            config=job.config.model_dump(mode="json"),
            plan=hashes(job.plan).fingerprint,
            layout=job.config.mesh.layout(),
            after_step=done,
            recorded_step=self._file.recorded_step,
        )
        self._trackers = Trackers(job.config.train.trackers, run)

    def record(
        self, result: StepResult, seconds: float, validation: Validation | None, counts: Counts | None = None
    ) -> None:
        """Record one step.

        Args:
            result: result of the step.
            seconds: duration of the step.
            validation: validation after the step, if there was one.
            counts: tokens per layer and expert, if there are any.
        """
        train, step, batch = self._job.config.train, result.step, self._job.plan.batch
        # Padding of packed documents is not trained on.
        num_tokens = result.num_units if batch.packed else batch.global_batch * batch.tokens
        values = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens_per_s": num_tokens / seconds,
            "memory_bytes": memory_bytes(self._job.device),
            "samples": [(step - 1) * train.global_batch, step * train.global_batch - 1],
            "skipped": result.skipped,
        }
        if validation is not None:
            values |= {"validation_loss": validation.loss, **validation.figures}
        if counts is not None:
            values["expert_load"] = vars(summarize_load(counts))
            if has_full_counts(counts, step=step, last=train.steps, every=train.log_every):
                values["expert_counts"] = counts
        values = in_unit(values, self._unit)
        self._file.write(values)
        self._trackers.log(step, tracked_values(values))
        for name, path in validation.images.items() if validation is not None else ():
            self._trackers.image(step, name, path)
        self._reporter.progress(self._progress(result, values))

    def _progress(self, result: StepResult, values: dict[str, Any]) -> Progress:
        steps, step = self._job.config.train.steps, result.step
        seconds_per_step = (time.perf_counter() - self._started) / (step - self._done)
        return Progress(
            step=step,
            steps=steps,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens_per_s=values["tokens_per_s"],
            memory_bytes=values["memory_bytes"],
            eta_s=seconds_per_step * (steps - step),
            skipped=result.skipped,
            expert_load=values.get("expert_load", {}).get("max_over_mean"),
        )

    def record_sample(self, step: int, text: str) -> None:
        """Pass the text generated by the trained model to the trackers."""
        self._trackers.text(step, "sample", text)

    def close(self, *, failed: bool) -> None:
        """Close the metrics file and the trackers; `failed` if the run did not complete."""
        self._file.close()
        self._trackers.close(failed=failed)


def in_unit(values: Mapping[str, Any], unit: LossUnit) -> dict[str, Any]:
    """Return a step's metrics with losses in `unit` and named after it; losses with a unit in their name stay."""
    found = {}
    for name, value in values.items():
        is_loss = name in LOSSES
        found[unit.metric(name) if is_loss else name] = value * unit.scale if is_loss and value is not None else value
    return found


def tracked_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a step's metrics, which is what sinks get."""
    flat = {name: value for name, value in values.items() if name != "step"}
    for name, section in values.items():
        if isinstance(section, Mapping):
            flat |= {f"{name}/{key}": value for key, value in section.items()}
    numbers = {name: value for name, value in flat.items() if isinstance(value, int | float)}
    return {name: int(x) if isinstance(x, bool) else x for name, x in numbers.items() if math.isfinite(x)}


def draw_metrics(job: Job, folder: RunFolder, unit: LossUnit) -> tuple[str, ...]:
    """Draw a run's metrics into its folder, and return the names of the files."""
    title = job.config.name
    plot_loss(folder.metrics, folder.path / LOSS_FIGURE, title=title, unit=unit)
    rows = load_rows(job.plan)
    if not rows:
        return (LOSS_FIGURE,)
    from meshwright.train.record.draw_expert_load import draw_expert_load

    out, experts = folder.path / LOAD_FIGURE, experts_per_layer(rows)
    drawn = draw_expert_load(folder.metrics, out, title=title, experts=experts)
    return (LOSS_FIGURE, LOAD_FIGURE) if drawn else (LOSS_FIGURE,)


def plot_loss(metrics: Path, out: Path, *, title: str, unit: LossUnit) -> None:
    """Plot training and validation loss over steps."""
    from matplotlib.figure import Figure

    lines, key = list(read_metrics(metrics)), unit.metric(LOSS)
    figure = Figure(figsize=(7, 4), dpi=120)
    plot = figure.subplots()
    train = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    held_out = [(line["step"], line[f"validation_{key}"]) for line in lines if line.get(f"validation_{key}")]
    plot.plot(*zip(*train, strict=True), linewidth=1, label="training") if train else None
    if held_out:
        plot.plot(*zip(*held_out, strict=True), marker="o", linewidth=1.5, label=f"validation {held_out[-1][1]:.2f}")
    plot.set(xlabel="step", ylabel=f"loss ({unit.name})", title=title)
    plot.grid(alpha=0.3)
    if train or held_out:
        plot.legend()
    figure.tight_layout()
    with writing(out):
        figure.savefig(out)
