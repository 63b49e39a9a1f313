"""A configuration on the command line: a preset or a file, then `section.key=value`; `presets` and `keys` list them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from meshwright.cli.wrapping import paint, show
from meshwright.errors import InputError
from meshwright.units import format_bytes, format_count

WORDS_HELP = (
    "A preset, a TOML file or a run folder (default: llama-tiny), then section.key=value …, also as --lr 1e-3. "
    "meshwright keys [WORD] lists them."
)


def complete_words(incomplete: str) -> list[str]:
    """Return presets and files, keys, and values of a key, that begin like the word that is being typed."""
    from meshwright.config.overlay import fields
    from meshwright.config.source import preset_names
    from meshwright.models.contract.family import family_names

    known = {key: field for kind in family_names() for key, field in fields(kind).items()}
    key, equals, _ = incomplete.partition("=")
    if equals:
        words = [f"{key}={value}" for value in _choices(known[key].annotation)] if key in known else []
    else:
        runs = (str(file.parent) for file in Path().glob("runs/*/config.toml"))
        words = [*preset_names(), *map(str, Path().glob("*.toml")), *runs, *(f"{key}=" for key in known)]
    return [word for word in words if word.startswith(incomplete)]


def _choices(annotation: Any) -> list[str]:
    """Return the values of a key that has a few."""
    kinds = get_args(annotation) or (annotation,)
    return ["true", "false"] if bool in kinds else [str(kind) for kind in kinds if isinstance(kind, str)]


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PRESET|FILE.toml|RUN] [KEY=VALUE]...", help=WORDS_HELP, autocompletion=complete_words),
]
"""Arguments of a command that takes a configuration."""


def split_words(words: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """Split arguments into the source (None for the default preset) and the overrides."""
    words = list(words or ())
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def path_of(option: str, text: str | None) -> Path | None:
    """Return the path given to an option, or None without it.

    Raises:
        InputError: the text is empty, which would otherwise be read as the current folder.
    """
    if text == "":
        raise InputError(
            f"{option} is empty",
            where=f"command line, {option}",
            rule=f"{option} takes a path; an unset shell variable expands to an empty one",
            fix=f"leave {option} out, or {option} . for the current folder",
        )
    return None if text is None else Path(text)


def keys(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="Part of a name, of a meaning, or another framework's name."),
    ] = None,
) -> None:
    """Find configuration keys, with their defaults, meanings and names in other frameworks; all without WORD."""
    from meshwright.config.known_keys import known_keys, search

    text = " ".join(words or ())
    found = search(text) if text else known_keys()
    if not found:
        raise InputError(
            f"no key has {text!r} in its name or meaning",
            where="command line",
            rule="keys are found by part of a name, by words of their meaning, and by names of other frameworks",
            fix="meshwright keys, which lists all",
        )
    for key in found:
        families = f" · {', '.join(key.families)} only" if key.families else ""
        show(f"{paint(f'{key.name}={key.default}', 'bold', sys.stdout)}  {key.type.replace('`', '')}{families}")
        show(f"  {key.meaning}", more="  ")
        if key.elsewhere and text:
            show(f"  elsewhere: {', '.join(key.elsewhere)}", more="  ")


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
