"""`meshwright draw reshard`: how a tensor gets from one layout to another, as a table, as a picture and as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.errors import LayoutError, MeshwrightError

if TYPE_CHECKING:
    from meshwright.reshard import Topology

COMMAND_LINE = "command line"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def reshard(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A word for each mesh axis: R copies, S0 cuts dim 0, "
                                          "P or P(max) partial values, SS0/4 strided; S0@1 S0@0 cuts by the second "
                                          "axis first.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Likewise.")],
    mesh: Annotated[str, typer.Option(help="Ranks on each mesh axis, as 4,8.")],
    shape: Annotated[str, typer.Option(help="Of the whole tensor, as 8192,8192.")],
    dtype: Annotated[str, typer.Option(help="Of its elements.")] = "bf16",
    topology: Annotated[str | None, typer.Option(metavar="PRESET", help="A cluster whose links the axes use; without "
                                                 "it all axes have the same one.")] = None,
    memory_cap: Annotated[str | None, typer.Option(help="What a rank may hold at once, as 100MB or 1.5GiB.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write a picture, .svg or .png.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead of a table.")] = False,
) -> None:  # fmt: skip
    """Plan how a tensor gets from one layout to another: steps, bytes, time, memory."""
    from meshwright.figure import check_picture
    from meshwright.mesh.layout import Layout
    from meshwright.reshard import draw_plan, explain_plan, plan

    if out is not None:
        check_picture(out)
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
    print(planned.to_json() if json else explain_plan(planned))
    if out is not None:
        draw_plan(planned, str(out))
        if not json:
            print(f"picture   {out}")


def _located(error: MeshwrightError, where: str, words: dict[str, str]) -> LayoutError:
    """The error with its place on the command line, and its fix in the command line's words."""
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
            rule=f"whole numbers of at least {least} with commas between",
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
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise LayoutError(
            f"--memory-cap {text!r}",
            where=f"{COMMAND_LINE}, --memory-cap",
            rule="a number of bytes, of kB, MB, GB (1000), or of KiB, MiB, GiB (1024)",
            fix="--memory-cap 100MB",
        )
    return int(float(found[1]) * unit)
