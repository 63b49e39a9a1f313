"""Loss curves of several runs: read from run folders, compared with the first, and drawn."""

from __future__ import annotations

import shlex
import textwrap
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config.overlay import flatten
from meshwright.errors import InputError
from meshwright.figure import GREY, INK, curve_style, plain, save_figure
from meshwright.models.contract.model_facts import unit_of_metric
from meshwright.settings.violation import format_value
from meshwright.train.record.record_files import LOSS, damaged_metrics, loss_key, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_KEYS = 4
"""Most keys in the label of a run."""
MAX_VALUE = 32
"""Most characters of a value in the label of a run."""
MAX_WINDOW = 20
"""Most steps that differences are averaged over."""
WIDTH, PLOTS, LINE = 8.0, 4.4, 0.18
"""Inches: width of the figure, height of the plots with their labels, and height of a line of text."""
CHARACTERS = 100
"""Characters of a label that fit into a line."""


@dataclass(frozen=True)
class Curve:
    """Loss curve of a run."""

    name: str
    """Label made of the configuration keys that differ between the runs."""
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    """Loss per step in `unit`, excluding steps with a non-finite loss."""
    validation: float | None
    """Last validation loss, in `unit`."""
    unit: str
    """Name of the unit, such as `bits/byte`; empty if an earlier version wrote the run's metrics."""


def read_curves(folders: Sequence[Path]) -> list[Curve]:
    """Return the loss curves of the runs in these folders, which are all in one unit.

    Raises:
        InputError: a folder is not a run folder, its metrics are damaged, the run has no steps, or losses are in
            different units.
    """
    configs = [_config(folder) for folder in folders]
    names = run_names(folders, configs)
    curves = [_curve(folder, name) for folder, name in zip(folders, names, strict=True)]
    if other := next((curve for curve in curves if curve.unit != curves[0].unit), None):
        one, two = (curve.unit or "a unit that their metrics don't name" for curve in (curves[0], other))
        same = [str(folder) for folder, curve in zip(folders, curves, strict=True) if curve.unit == curves[0].unit]
        raise InputError(
            f"the losses of {folders[0]} are in {one}, those of {folders[curves.index(other)]} in {two}",
            where=str(folders[curves.index(other)]),
            rule="losses are compared in one unit",
            fix=f"meshwright draw loss {shlex.join(same)}, and the others by themselves",
        )
    return curves


def _curve(folder: Path, name: str) -> Curve:
    path = folder / "metrics.jsonl"
    lines = list(read_metrics(path))
    keys = sorted({loss_key(line) for line in lines})
    if len(keys) > 1:
        raise damaged_metrics(path, f"has losses in several units: {' and '.join(keys)}", str(path))
    key = keys[0] if keys else LOSS
    lines = [line for line in lines if line[key] is not None]
    if not lines:
        raise not_a_run(folder, "no step with a loss")
    held_out = [line[f"validation_{key}"] for line in lines if line.get(f"validation_{key}") is not None]
    return Curve(
        name=name,
        steps=tuple(line["step"] for line in lines),
        losses=tuple(line[key] for line in lines),
        validation=held_out[-1] if held_out else None,
        unit=unit_of_metric(key),
    )


def run_names(folders: Sequence[Path], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each run: the keys that differ, without their section where the last word is enough.

    Keys with the most values are first. Labels that would be equal get the run's folder in front.

    Args:
        folders: the run folders.
        configs: their configurations, keyed by dotted path.
    """
    differing = differing_keys(configs)
    leaves = Counter(key.rpartition(".")[2] for key in differing)
    short = {key: leaf if leaves[leaf := key.rpartition(".")[2]] == 1 else key for key in differing}
    names = []
    for config in configs:
        own = [f"{short[key]}={_shorten(format_value(config[key]))}" for key in differing if key in config]
        more = [f"… {len(own) - MAX_KEYS} more"] if len(own) > MAX_KEYS else []
        names.append(" ".join(own[:MAX_KEYS] + more))
    if len(set(names)) == len(names) and all(names):
        return names
    bases = [folder.name for folder in folders]
    shown = bases if len(set(bases)) == len(bases) else [str(folder) for folder in folders]
    return [f"{folder}: {name}" if name else folder for folder, name in zip(shown, names, strict=True)]


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between configurations, those with the most values first."""
    known = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in known if any(config.get(key) != configs[0].get(key) for config in configs)]
    return sorted(differing, key=lambda key: -len({repr(config.get(key)) for config in configs}))


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE // 2]}…{text[1 - MAX_VALUE // 2 :]}"


def _config(folder: Path) -> dict[str, Any]:
    """Return the run's configuration, keyed by dotted path."""
    try:
        if not (folder / "metrics.jsonl").is_file():
            raise not_a_run(folder, "no metrics.jsonl")
        return flatten(tomllib.loads((folder / "config.toml").read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise not_a_run(folder, f"no readable config.toml ({error})") from None


def not_a_run(folder: Path, why: str) -> InputError:
    """Return the error that a folder is not that of a run."""
    return InputError(
        f"{folder} is not a run folder: {why}",
        where=str(folder),
        rule="a run folder has metrics.jsonl and config.toml",
        fix="the folder given to run --out, or printed at the end of a run",
    )


def draw_losses(curves: Sequence[Curve], path: Path, *, title: str, window: int) -> None:
    """Write the figure as .svg or .png.

    Args:
        curves: loss curves of the runs; each is compared with the first one at their common steps.
        path: file to write.
        title: headline on the first line, explanation on the following lines.
        window: number of steps to average over in the lower plot, since single-step losses are noisy.

    Raises:
        InputError: the file can't be written.
    """
    save_figure(lambda: _figure(curves, title, window), path)


def common_steps(curve: Curve, first: Curve) -> list[int]:
    """Return the steps at which both runs have a finite loss, in order."""
    return sorted(set(curve.steps) & set(first.steps))


def default_window(curves: Sequence[Curve]) -> int:
    """Return the number of steps to average differences over: a tenth of the shortest run, at most `MAX_WINDOW`."""
    return max(1, min(MAX_WINDOW, min(len(curve.steps) for curve in curves) // 10))


def differences(curve: Curve, first: Curve, *, window: int) -> tuple[list[int], list[float]]:
    """Return steps and the relative loss difference from the first run up to them, averaged over common steps.

    The mean is over `window` steps, or over all common ones if there are fewer.
    """
    steps = common_steps(curve, first)
    found, reference = (dict(zip(one.steps, one.losses, strict=True)) for one in (curve, first))
    apart = [found[step] / reference[step] - 1 for step in steps]
    size = min(window, len(steps))
    ends = range(size, len(steps) + 1) if steps else range(0)
    return [steps[end - 1] for end in ends], [sum(apart[end - size : end]) / size for end in ends]


def _figure(curves: Sequence[Curve], title: str, window: int) -> Figure:
    from matplotlib.figure import Figure

    headline, *explanation = title.splitlines()
    held_out = ["" if curve.validation is None else f", validation {curve.validation:.4f}" for curve in curves]
    labels = [textwrap.fill(curve.name + more, CHARACTERS) for curve, more in zip(curves, held_out, strict=True)]
    num_lines = sum(label.count("\n") + 1 for label in labels)
    text = 0.5 + LINE * (len(explanation) + num_lines)
    height = PLOTS + text
    figure = Figure(figsize=(WIDTH, height))
    above = figure.add_axes((0.11, 2.1 / height, 0.86, (PLOTS - 2.1) / height))
    below = figure.add_axes((0.11, 0.5 / height, 0.86, 1.5 / height), sharex=above)
    for i, (curve, label) in enumerate(zip(curves, labels, strict=True)):
        width = 1.1 if i or len(curves) == 1 else 2.6  # the first one shows behind a curve that equals it
        above.plot(curve.steps, curve.losses, linewidth=width, label=label, **curve_style(i, len(curve.steps)))
    for i, curve in enumerate(curves[1:], start=1):
        steps, apart = differences(curve, curves[0], window=window)
        below.plot(steps, [100 * value for value in apart], linewidth=1.4, **curve_style(i, len(steps)))
    below.axhline(0.0, color=INK, linewidth=1.1)
    above.set_ylabel(f"loss ({curves[0].unit})" if curves[0].unit else "loss", fontsize=9, color=INK)
    above.tick_params(labelbottom=False)
    below.set_ylabel("difference, %", fontsize=9, color=INK)
    below.set_xlabel("step", fontsize=9, color=INK)
    figure.text(0.02, 1 - 0.12 / height, headline, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(0.02, 1 - 0.38 / height, "\n".join(explanation), fontsize=9, color=GREY, va="top")
    top = 1 - (0.4 + LINE * len(explanation)) / height
    figure.legend(
        loc="upper left", bbox_to_anchor=(0.01, top), frameon=False, fontsize=8.5, labelcolor=INK, borderpad=0.0
    )
    for axes in (above, below):
        plain(axes)
    return figure
