"""Terminal output of a run: the plan, a live progress line and the result; plain lines if stdout is not a terminal."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from meshwright.cli.wrapping import CLEAR_LINE, is_terminal, paint, show, tolerate
from meshwright.lasting_output import lasting
from meshwright.models.contract.model_facts import LossUnit
from meshwright.plan.traffic import Traffic
from meshwright.train.record.reporter import Progress, Reporter, Start, Summary, Validation
from meshwright.units import counted, format_bytes, format_count, format_duration

BARS = "▁▂▃▄▅▆▇█"
REFRESH_S = 0.2
SPARK_POINTS = 8
DISPENSABLE = ("bars", "memory", "norm", "load", "speed")
"""Parts of the progress line to drop on narrow terminals, in this order."""


class TerminalReporter(Reporter):
    """Reporter that prints a run's progress to stdout."""

    def __init__(self, *, quiet: bool = False, log_every: int = 10) -> None:
        self._quiet = quiet
        self._log_every = log_every
        self._is_terminal = is_terminal(sys.stdout)
        self._losses: list[float] = []
        self._last_shown = 0.0
        self._line_is_open = self._is_terminal  # the launcher may have left its waiting message on the line
        tolerate(sys.stdout)
        self._out = lasting(sys.stdout, warns=True)
        self._steps = 0
        self._unit = LossUnit("nats/token")
        self._start: Mapping[str, float] = {}

    def started(self, start: Start) -> None:
        """Print a summary of the plan: the model, its layout and its traffic."""
        self._steps, self._unit = start.steps, start.unit
        where = start.device if start.backend is None else f"{start.device}, {start.backend}"
        processes = counted(start.num_ranks, "process")
        mesh = processes if start.num_ranks == 1 else f"mesh {start.mesh} = {processes}"
        name = paint(start.name, "bold", sys.stdout)
        self._print(f"{name} · {format_count(start.num_params)} parameters · {start.corpus}")
        self._print(
            f"{mesh} ({where}) · batch {start.global_batch} × {start.seq_len} tokens · "
            f"predicted {format_bytes(start.predicted_bytes)} per rank · {start.folder}"
        )
        if start.traffic.entries:
            self._print(f"each rank sends at most {_amount(start.traffic, 'per step')}: {_purposes(start.traffic)}")
        if start.traffic.sent().between_nodes:
            self._print(f"  {_links(start.traffic)}")

    def note(self, text: str) -> None:
        """Print one line."""
        self._print(text)

    def waiting(self, text: str) -> None:
        """Replace the progress line with the reason for a wait."""
        if self._is_terminal and not self._quiet:
            self._show(f"{text} …")
            self._last_shown = -math.inf  # let the next progress line replace it immediately

    def under_way(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Keep the times of the slowest rank's start."""
        self._start = max(ranks, key=lambda one: sum(one.values()))

    def progress(self, progress: Progress) -> None:
        """Print a line every `log_every` steps; on a terminal, show the steps between them on a live line."""
        if math.isfinite(progress.loss):
            self._losses.append(progress.loss)
        is_last = progress.step == progress.steps
        if progress.skipped:
            self._print(f"step {progress.step} was not finite and was skipped on all ranks")
        if self._quiet:
            return
        stays = progress.step % self._log_every == 0 or is_last
        if self._is_terminal and (stays or time.monotonic() - self._last_shown >= REFRESH_S):
            self._show(self._text(progress), stays=stays)
        elif not self._is_terminal and (stays or progress.step == 1):
            print(self._text(progress), file=self._out, flush=True)

    def validated(self, step: int, validation: Validation) -> None:
        """Print the validation loss, except for the last one, which is part of the result."""
        if step < self._steps:
            self._print(f"step {step}  validation {self._words(validation)}")

    def finished(self, summary: Summary) -> None:
        """Print the run's result and files."""
        if summary.validation is not None:
            result = self._words(summary.validation)
            steps = counted(summary.steps, "step")
            if 0 < summary.steps_here < summary.steps:
                steps = f"{summary.steps_here} of {steps}"
            result = paint(f"validation {result}", "green", sys.stdout)
            time = f"{steps} in {format_duration(summary.seconds)}" if summary.steps_here else steps
            self._print(f"{result} · {time} · run folder {summary.folder}")
        saved = [f"checkpoints/{summary.checkpoint.name}"] if summary.checkpoint is not None else []
        again = f"meshwright run {shlex.quote(str(summary.folder / 'config.toml'))}"
        if summary.plan_given:
            again += f" --plan {shlex.quote(str(summary.folder / 'plan.json'))}"
        repeat = [f"repeat: {again}"] if summary.steps_here == summary.steps else []  # steps before may have had others
        self._print("  " + " · ".join(("report.html", "metrics.jsonl", *summary.figures, *saved, *repeat)))
        if self._start:
            phases = (f"{phase} {format_duration(s)}" for phase, s in self._start.items() if round(s, 1))
            self._print(f"  first step after {format_duration(sum(self._start.values()))}: {' · '.join(phases)}")
        if summary.traffic.entries and summary.steps_here:
            sent = summary.traffic.over(summary.steps_here)
            where = f" · {_links(sent)}" if sent.sent().between_nodes else ""
            steps = counted(summary.steps_here, "step")
            self._print(f"  sent in {steps}, predicted: {_amount(sent, 'per rank')}{where}")
            if summary.counted is not None:
                found = f"{_amount(summary.counted, 'of gradients and weights')} · {_links(summary.counted)}"
                self._print(f"  counted on rank 0: {found}")
        for one in summary.all_to_alls:
            found = f"{format_bytes(one.sent)} · predicted {format_bytes(one.predicted)}"
            known = f", from the {one.basis} {format_bytes(one.explained)}" if one.basis else ""
            self._print(f"  all-to-all of {one.purpose}, on rank 0: {found}{known}")
        if summary.sample is not None:
            self._print(paint("sample", "bold", sys.stdout))
            for line in summary.sample.splitlines():
                self._print("  " + "".join(c if c.isprintable() else "�" for c in line))

    def _text(self, progress: Progress) -> str:
        parts = {
            "step": f"step {progress.step}/{progress.steps}",
            "loss": f"loss {self._unit.words(progress.loss)}",
            "bars": _spark(self._losses) if self._is_terminal else "",
            "norm": f"grad norm {progress.grad_norm:.2f}",
            "load": "" if progress.expert_load is None else f"load {progress.expert_load:.2f}×",
            "speed": f"{format_count(progress.tokens_per_s)} tok/s",
            "memory": format_bytes(progress.memory_bytes),
            "rest": f"ETA {format_duration(progress.eta_s)}" if progress.step < progress.steps else "",
        }
        if self._is_terminal:
            for part in DISPENSABLE:
                if len(_joined(parts)) >= shutil.get_terminal_size().columns:
                    parts[part] = ""
        return _joined(parts)

    def _words(self, validation: Validation) -> str:
        figures = [f"{name.replace('_', ' ')} {value:.3f}" for name, value in validation.figures.items()]
        return " · ".join([self._unit.words(validation.loss), *figures])

    def _show(self, text: str, *, stays: bool = False) -> None:
        width = shutil.get_terminal_size().columns
        self._out.write(CLEAR_LINE + text[: width - 1] + "\n" * stays)
        self._out.flush()
        self._line_is_open = not stays
        self._last_shown = time.monotonic()

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        if self._line_is_open:
            self._out.write(CLEAR_LINE)
            self._line_is_open = False
        show(text, self._out)
        self._out.flush()


def _amount(traffic: Traffic, unit: str) -> str:
    sent, exact = traffic.sent().total(), traffic.exact().total()
    return f"{format_bytes(sent)} {unit}" + (f" (uncompressed {format_bytes(exact)})" if sent != exact else "")


def _with_and_without(sent: int, exact: int) -> str:
    return f"{format_bytes(sent)} instead of {format_bytes(exact)}" if sent != exact else format_bytes(sent)


def _links(traffic: Traffic) -> str:
    """Describe the bytes sent per kind of link, with and without compression."""
    sent, exact = traffic.sent(), traffic.exact()
    links = (
        (sent.inside_node, exact.inside_node, "inside a node"),
        (sent.between_nodes, exact.between_nodes, "between nodes"),
    )
    return " · ".join(f"{_with_and_without(now, without)} {where}" for now, without, where in links if now or without)


def _purposes(traffic: Traffic) -> str:
    """Describe the bytes sent per purpose, largest first."""
    entries = sorted(traffic.entries, key=lambda entry: -entry.sent.total())
    return " · ".join(f"{entry.purpose} {format_bytes(entry.sent.total())}" for entry in entries)


def _joined(parts: dict[str, str]) -> str:
    return "  ".join(filter(None, parts.values()))


def _spark(losses: list[float]) -> str:
    """Return the loss so far as a sparkline, in which each bar is the mean over an interval of steps."""
    if not losses:
        return ""
    size = max(1, len(losses) // SPARK_POINTS)
    parts = [losses[i : i + size] for i in range(0, len(losses) - size + 1, size)][-SPARK_POINTS:]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(BARS[round((m - low) / (high - low or 1) * (len(BARS) - 1))] for m in means)
