"""`meshwright calibrate`: measure this machine, and write it as a cluster file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.config_arguments import path_of
from meshwright.cli.wrapping import show
from meshwright.errors import ConfigError, InputError
from meshwright.units import format_duration

if TYPE_CHECKING:
    from meshwright.calibrate.calibrate import Calibration

BUSY_CORES = 0.2
"""Cores that other programs use from which on a calibration is disturbed."""
OUT_OPTION = "command line, -o"


def calibrate(
    out: Annotated[
        str | None, typer.Option("-o", "--out", help="The cluster file to write; by default that of this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cluster as JSON instead of a page.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    seconds: Annotated[float, typer.Option(min=1.0, help="Time of measuring, beside the start of processes.")] = 24.0,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="RUN", help="Scale known rates to what a run measured instead; repeat it."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="DEVICE|FILE", help="With --from: the cluster to scale; by default the run's.")
    ] = None,
) -> None:
    """Measure what this machine achieves, for predictions of time: plan --cluster here, and reports of runs."""
    from meshwright.calibrate.calibrate import calibrate as measure
    from meshwright.cluster.cluster_file import cluster_json, cluster_toml
    from meshwright.output_files import check_output, write_output

    path = path_of("-o", out) or _own_file()
    check_output(path, where=OUT_OPTION)
    comment = "Written by meshwright calibrate. docs/clusters.md explains the keys."
    if runs:
        from meshwright.cli.calibrate_from import scale

        scaled, lines = scale(runs, cluster)
        write_output(path, cluster_toml(scaled, comment), where=OUT_OPTION)
        for line in [cluster_json(scaled)] if as_json else [*lines, _written(path)]:
            show(line)
        return
    begin = time.perf_counter()
    found = measure(device=_device(device), budget_s=seconds, say=lambda text: print(text, file=sys.stderr))
    write_output(path, cluster_toml(found.cluster, comment), where=OUT_OPTION)
    if as_json:
        print(cluster_json(found.cluster))
        return
    for line in page(found, path, time.perf_counter() - begin):
        show(line)


def page(found: Calibration, path: Path, seconds: float) -> Iterator[str]:
    """Yield the lines of the page on a calibration."""
    cluster, performance = found.cluster, found.cluster.performance
    link, curve = cluster.inside_node, performance.links["inside_node"]
    host, bandwidth = performance.host, cluster.device.memory_bandwidth_bytes_per_s
    yield f"{cluster.device.name} · measured in {format_duration(seconds)}"
    yield "± is the standard deviation of measured over predicted times"
    yield "products of n × n matrices   n = 128      n = 1024"
    for name, one in performance.products.items():
        rates = (f"{2 * n**3 / one.seconds(n, n, n) / 1e9:.3g}" for n in (128, 1024))
        yield f"  {name:<20} {' '.join(f'{rate:>12}' for rate in rates)} GFLOP/s  ± {one.residual:.0%}"
    yield "attention                   length 512   backward"
    for name, each in performance.attention.items():
        rate = each.flops_per_s * 512 / (512 + each.half_length) / 1e9
        yield f"  {name:<20} {rate:>8.3g} GFLOP/s   {each.backward_slower:.2f} × 2.5  ± {each.residual:.0%}"
    yield "kernels bound by memory"
    yield f"  {bandwidth * performance.memory_efficiency / 1e9:.3g} GB/s  ± {performance.memory_residual:.0%}"
    yield "host"
    yield f"  {host.launch_us:.3g} µs per kernel · {host.block_us:.3g} µs per block"
    yield f"  {host.unit_us:.3g} µs per FSDP collective · {host.parameter_us:.3g} µs per parameter of the optimizer"
    if found.counts["collectives"]:
        achieved = link.bandwidth_bytes_per_s * curve.efficiency / 1e9
        yield "collectives"
        yield f"  {curve.latency_us:.3g} µs per step · {achieved:.3g} GB/s  ± {curve.residual:.0%}"
    if performance.shared:
        slower = " · ".join(f"{name} {times:.2f}" for name, times in performance.shared.items())
        yield "times while all cores are busy, over those alone"
        yield f"  {slower}"
    if found.counts["steps"]:
        yield "steps of small runs"
        several = f" · on several ± {performance.group_residual:.0%}" if performance.group_residual else ""
        yield f"  on one process ± {performance.residual:.0%}{several}"
    counts = ", ".join(f"{count} of {part}" for part, count in found.counts.items() if count)
    yield f"times: {counts}"
    if found.others > BUSY_CORES:
        yield f"other programs used {found.others:.1f} cores meanwhile: times may be too long"
        yield "repeat it on an idle machine"
    yield _written(path)


def _written(path: Path) -> str:
    from meshwright.cluster.presets import HERE, own_file

    return f"written to {path}: use it with --cluster {HERE if path == own_file() else path}"


def _own_file() -> Path:
    """Return the path of this machine's cluster file, whose folder exists.

    Raises:
        InputError: there is no home directory, or the folder can't be made.
    """
    from meshwright.cluster.presets import own_file

    path, why = own_file(), "there is no home directory"
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path
        except OSError as error:
            why = f"{path.parent}: {error.strerror}"
    rule = "a cluster file is written to this user's cache unless -o names another"
    raise InputError(f"no place for the cluster file: {why}", where=OUT_OPTION, rule=rule, fix="-o cluster.toml")


def _device(wanted: str) -> str:
    """Return `cpu` or `cuda`.

    Raises:
        ConfigError: another device, or no GPU where one is wanted.
    """
    if wanted == "cpu":
        return "cpu"
    import torch

    available = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if available else "cpu"
    if wanted == "cuda" and available:
        return "cuda"
    what = "this machine has no CUDA device" if wanted == "cuda" else f"--device {wanted}"
    raise ConfigError(what, where="command line, --device", rule="cpu, cuda or auto", fix="--device cpu")
