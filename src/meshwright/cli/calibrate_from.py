"""`meshwright calibrate --from RUN`: rates scaled to what runs measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.calibrate.from_runs import factors, recalibrated
from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import cluster_of_device, find_cluster
from meshwright.errors import InputError
from meshwright.train.report.comparison import MeasuredRun
from meshwright.train.report.run_data import read_run
from meshwright.units import counted

WHERE = "command line, --from"


def scale(folders: Sequence[Path], name: str | None) -> tuple[Cluster, list[str]]:
    """Return a cluster scaled to what runs measured, and the lines of a page on it.

    Args:
        folders: the runs, all on one device.
        name: preset or file of the cluster to scale; that of the device if None.

    Raises:
        InputError: a folder isn't a run that measured, devices differ, or no cluster has the device.
        ConfigError: a time can't be predicted.
    """
    runs = [MeasuredRun.of(read_run(folder)) for folder in folders]
    devices = list(dict.fromkeys(run.device for run in runs))
    if len(devices) > 1:
        what, rule = f"runs on {' and '.join(devices)}", "a cluster has one type of device"
        raise InputError(what, where=WHERE, rule=rule, fix="runs on one of them")
    cluster = find_cluster(name) if name is not None else cluster_of_device(devices[0])
    if cluster is None:
        what, rule = f"no preset has a {devices[0]}", "rates are scaled from known ones"
        raise InputError(what, where=WHERE, rule=rule, fix="meshwright calibrate on that device, or --cluster FILE")
    found = factors(cluster, runs)
    source = f"{cluster.performance.source}; scaled to {counted(len(runs), 'run')} on {devices[0]}"
    lines = [f"{cluster.name} · scaled to {counted(len(runs), 'run')}", "measured over predicted time, as before"]
    for part, one in found.items():
        spread = "" if one.deviation is None else f"  ± {one.deviation:.0%}"
        lines.append(f"  {part:<32} {one.mean:>6.3g} ×{spread}")
    return recalibrated(cluster, found, source=source), lines
