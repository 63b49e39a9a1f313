"""`meshwright presets`: list the presets, print one in full, or list the known devices."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.units import format_bytes, format_count


def presets(
    name: Annotated[str | None, typer.Argument(help="Print this preset in full, with every key.")] = None,
    devices: Annotated[bool, typer.Option("--devices", help="List the known devices.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="Print every key with its meaning, as Markdown.")] = False,
) -> None:
    """List the presets with their size and layout, or print one."""
    from meshwright.config.facts_for_family import model_facts
    from meshwright.config.known_keys import keys_table
    from meshwright.config.load import load as load_keys
    from meshwright.config.source import preset_names, to_toml
    from meshwright.plan.rules import load

    if keys:
        print(keys_table(), end="")
    elif devices:
        _print_devices()
    elif name is not None:
        print(to_toml(load(name)), end="")
    else:
        print("preset            parameters        batch  precision  ranks")
        for preset in preset_names():
            config = load_keys(preset, rules=lambda *_: iter(()))  # they hold, and some build the model
            axes, train, family = config.mesh.axes(), config.train, config.family
            ranks = f"{axes.num_ranks()} ({axes})" if axes.num_ranks() > 1 else "1"
            facts = None if family.derives else model_facts(config)
            size = "any" if facts is None else format_count(facts.num_params())
            batch = f"{train.global_batch} × {train.seq_len if facts is None else facts.tokens}"
            print(f"{preset:<16}  {size:>10}  {batch:>11}  {train.precision:<9}  {ranks}")


def _print_devices() -> None:
    from meshwright.cluster.presets import cluster_preset
    from meshwright.cluster.presets import preset_names as cluster_names

    devices = {name: cluster_preset(name).device for name in cluster_names()}
    dtypes = dict.fromkeys(dtype for device in devices.values() for dtype in device.peak_flops)
    print("device        memory  peak TFLOP/s")
    print(f"{'':20}" + "".join(f"{dtype:>8}" for dtype in dtypes))
    for name, device in devices.items():
        rates = [f"{device.peak_flops[dtype] / 1e12:g}" if dtype in device.peak_flops else "–" for dtype in dtypes]
        print(f"{name:<10} {format_bytes(device.memory_bytes):>9}" + "".join(f"{rate:>8}" for rate in rates))
