"""`meshwright draw reshard`: a tensor's redistribution as a table, a figure and JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.wrapping import show
from meshwright.errors import LayoutError, MeshwrightError

if TYPE_CHECKING:
    from meshwright.reshard import Topology

COMMAND_LINE = "command line"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def reshard(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A word per mesh axis: R replicated, S0 sharded on dim "
                                          "0, P or P(max) partial, SS0/4 strided; S0@1 S0@0 shards by the second "
                                          "axis first.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The target layout, likewise.")],
    mesh: Annotated[str, typer.Option(help="Size of each mesh axis, such as 4,8.")],
    shape: Annotated[str, typer.Option(help="Shape of the full tensor, such as 8192,8192.")],
    dtype: Annotated[str, typer.Option(help="Data type of the tensor.")] = "bf16",
    topology: Annotated[str | None, typer.Option(metavar="PRESET", help="Cluster preset for the links of the axes; "
                                                 "without it all links are equal.")] = None,
    memory_cap: Annotated[str | None, typer.Option(help="Peak memory per rank, such as 100MB or 1.5GiB.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a figure, .svg or .png.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """Plan the redistribution of a tensor: steps, bytes, time, memory."""
    from meshwright.figure import check_figure
    from meshwright.mesh.layout import Layout
    from meshwright.reshard import draw_plan, explain_plan, plan

    if out is not None:
        check_figure(out)
    axis_sizes = _numbers("--mesh", mesh, "4,8", least=1)
    sizes = _numbers("--shape", shape, "8192,8192", least=0)
    layouts = []
    for name, text in (("FROM", source), ("TO", target)):
        try:
            layouts.append(Layout.parse(text, axis_sizes, sizes))
        except LayoutError as error:
            raise _located(error, f"{COMMAND_LINE}, {name}", {}) from None
    links = _topology(topology, axis_sizes)
    cap = None if memory_cap is None else _bytes(memory_cap)
    try:
        planned = plan(*layouts, dtype=dtype, topology=links, memory_cap_bytes=cap)
    except LayoutError as error:
        words = {r"dtype='(\w+)'": r"--dtype \1", r"memory_cap_bytes=(\d+)": r"--memory-cap \1"}
        option = {"dtype": "--dtype", "memory_cap_bytes": "--memory-cap"}.get(error.where, error.where)
        raise _located(error, f"{COMMAND_LINE}, {option}", words) from None
    if json:
        print(planned.to_json())
    else:
        for line in explain_plan(planned).splitlines():
            show(line)
    if out is not None:
        draw_plan(planned, str(out))
        if not json:
            show(f"figure    {out}")


def _located(error: MeshwrightError, where: str, words: dict[str, str]) -> LayoutError:
    """Return the error with its location on the command line and its fix as a command-line option."""
    fix = error.fix
    for pattern, word in words.items():
        fix = re.sub(pattern, word, fix)
    return LayoutError(error.what, where=where, rule=error.rule, fix=fix)


def _numbers(option: str, text: str, example: str, *, least: int) -> tuple[int, ...]:
    words = [word for word in re.split(r"[,x×\s]+", text.strip()) if word]
    if not words or not all(re.fullmatch(r"\d+", word) and int(word) >= least for word in words):
        raise LayoutError(
            f"{option} {text!r}",
            where=f"{COMMAND_LINE}, {option}",
            rule=f"takes integers of at least {least}, separated by commas",
            fix=f"{option} {example}",
        )
    return tuple(map(int, words))


def _topology(name: str | None, axis_sizes: tuple[int, ...]) -> Topology | None:
    from meshwright.cluster.presets import cluster_preset
    from meshwright.reshard import Topology

    if name is None:
        return None
    try:
        return Topology.of(cluster_preset(name), axis_sizes)
    except MeshwrightError as error:
        raise _located(error, f"{COMMAND_LINE}, --topology", {r"^(\S+).*": r"--topology \1"}) from None


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise LayoutError(
            f"--memory-cap {text!r}",
            where=f"{COMMAND_LINE}, --memory-cap",
            rule="takes bytes, kB, MB, GB (powers of 1000), or KiB, MiB, GiB (powers of 1024)",
            fix="--memory-cap 100MB",
        )
    return int(float(match[1]) * unit)
