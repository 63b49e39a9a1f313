"""`meshwright presets`: list the presets, print one in full, or list the known devices."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.cli.wrapping import show
from meshwright.units import format_bytes, format_count


def presets(
    name: Annotated[str | None, typer.Argument(help="Print this preset in full, with every key.")] = None,
    devices: Annotated[bool, typer.Option("--devices", help="List the known devices.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="Print every key with its meaning, as Markdown.")] = False,
) -> None:
    """List the presets with their size and layout, or print one."""
    from meshwright.config.dump import keys_table, to_toml
    from meshwright.config.facts_for_family import model_facts
    from meshwright.config.source import preset_names
    from meshwright.plan.load_config import load

    if keys:
        print(keys_table(), end="")
    elif devices:
        _print_devices()
    elif name is not None:
        print(to_toml(load(name)), end="")
    else:
        for preset in preset_names():
            config = load(preset)
            axes, train = config.mesh.axes(), config.train
            batch = f"{train.global_batch} × {model_facts(config).tokens}"
            ranks = f"{axes.num_ranks()} ranks ({axes})" if axes.num_ranks() > 1 else str(axes)
            show(
                f"{preset:<16} {format_count(model_facts(config).num_params()):>8} parameters · "
                f"{ranks} · batch {batch} · {train.precision}",
                more=" " * 20,
            )


def _print_devices() -> None:
    from meshwright.cluster.presets import cluster_preset
    from meshwright.cluster.presets import preset_names as cluster_names

    for name in cluster_names():
        device = cluster_preset(name).device
        rates = ", ".join(f"{dtype} {rate / 1e12:.4g}" for dtype, rate in device.peak_flops.items())
        show(f"{name:<10} {format_bytes(device.memory_bytes):>9} · peak TFLOP/s: {rates}", more=" " * 20)
