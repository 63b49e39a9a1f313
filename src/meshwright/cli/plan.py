"""`meshwright plan`: the layout, memory and traffic of a run before it starts."""

from __future__ import annotations

import gc
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.config_arguments import complete_words, path_of, split_words
from meshwright.cli.wrapping import paint, show
from meshwright.errors import InputError
from meshwright.output_files import check_output, write_output
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.cluster.hardware import Cluster
    from meshwright.config.schema import RunConfig
    from meshwright.plan.run_plan import RunPlan

STDOUT = Path("-")
PLAN_HELP = "A preset, a TOML file or a plan file (default: llama-tiny), then section.key=value …"
JSON_OPTION, OUT_OPTION = "command line, --json", "command line, -o"


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PRESET|FILE] [KEY=VALUE]...", help=PLAN_HELP, autocompletion=complete_words),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write memory, traffic and the plan as JSON; - for stdout.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the plan, for run --plan FILE.")] = None,
    diff: Annotated[
        str | None,
        typer.Option(metavar="OTHER", help="List the differences from a plan file, or from quoted overrides."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="DEVICE|FILE", help="Predict the time of a step: a preset, a cluster file, or here."),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw memory, with --cluster a step, or with --devices all layouts: .svg or .png."),
    ] = None,
    experts: Annotated[
        str, typer.Option(metavar="zipf[:EXPONENT]|RUN", help="With --cluster: the load of experts.")
    ] = "",
    documents: Annotated[
        str, typer.Option(metavar="LENGTH,...", help="With --cluster: lengths of packed documents, repeated.")
    ] = "",
    run: Annotated[
        str | None, typer.Option("--against", metavar="RUN", help="Compare the prediction with what a run measured.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="64xH100", help="Find the fastest layouts on these devices.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--global-batch", min=1, help="Samples per step.")] = None,
    top: Annotated[int, typer.Option(min=1, max=20, help="With --devices: number of layouts.")] = 3,
    why: Annotated[
        str | None, typer.Option(metavar="tp=8,pp=4", help="With --devices: what such layouts lack or cost.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="With --devices: dollars per device and hour.")] = None,
) -> None:
    """Show and verify a run's memory, traffic, stages, units and reductions without starting it, or with --devices find
    its layout."""
    gc.set_threshold(1_000_000)  # what a plan consists of stays; to look for garbage in it takes a tenth of the time
    _check_files(json_path, out, figure)
    if (experts or documents) and (cluster is None or devices or run):
        what, rule = "a load without the time of a plan", "--experts and --documents change the time of a step"
        raise InputError(what, where="command line", rule=rule, fix="beside them --cluster H100 alone")
    if devices is not None:
        from meshwright.cli.plan_search import search_page

        search_page(
            words, devices=devices, cluster=cluster, batch=batch, top=top, why=why, price=price, out=out, figure=figure
        )
        return
    chosen = None if cluster is None else _cluster(cluster)
    if run is not None:
        _show_against(run, words, chosen)
        return
    _show_plan(words, chosen, (experts, documents), json_path, out, diff, figure)


def _check_files(json_path: Path | None, out: Path | None, figure: Path | None) -> None:
    """Check that files can be written before anything is computed."""
    for path, where in ((json_path, JSON_OPTION), (out, OUT_OPTION)):
        if path is not None and path != STDOUT:
            check_output(path, where=where)
    if figure is not None:
        from meshwright.figure import check_figure

        check_figure(figure)


def _cluster(name: str) -> Cluster:
    from meshwright.cluster.presets import find_cluster

    return find_cluster(name)


def _show_plan(
    words: list[str] | None,
    chosen: Cluster | None,
    load: tuple[str, str],
    json_path: Path | None,
    out: Path | None,
    diff: str | None,
    figure: Path | None,
) -> None:
    """Show a plan or its differences from another, and write the files that were asked for."""
    from meshwright.plan.serialize import to_json
    from meshwright.plan.verify import verify

    name, made, config = _plan_of(words, cluster=chosen)
    verify(made, where=name)
    timed = made
    if any(load):
        from meshwright.cli.plan_load import under_load

        timed = under_load(made, *load)
    other = None if diff is None else _plan_of(_words(diff), where="command line, --diff")[1]
    # Write files first: closing a pager may end the command before the page is complete.
    if out is not None:
        write_output(out, to_json(made), where=OUT_OPTION)
    if figure is not None:
        _draw(name, timed, config, chosen, figure)
    figures = "" if json_path is None else json.dumps(_figures(name, made, timed, config, chosen), indent=1)
    if json_path is not None and json_path != STDOUT:
        write_output(json_path, figures + "\n", where=JSON_OPTION)
    if other is not None:
        _show_differences(made, other)
    elif json_path != STDOUT:
        from meshwright.cli.plan_page import page
        from meshwright.config.resolve import notes_of

        for line in page(name, made, config=config, cluster=chosen, timed=timed):
            show(paint(line, "bold", sys.stdout) if line and line[0] != " " else line)
        for note in () if config is None else notes_of(config):
            show(note)
    if json_path == STDOUT:
        print(figures)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"can't parse {text!r}: {error}",
            where="command line, --diff",
            rule="takes a plan file, or a preset with overrides in one pair of quotes",
            fix='--diff "llama-tiny mesh.dp_shard=2"',
        ) from None


def _plan_of(
    words: list[str] | None, *, where: str = "command line", cluster: Cluster | None = None
) -> tuple[str, RunPlan, RunConfig | None]:
    """Return the name and plan for the given arguments: a preset, a configuration file, overrides, or a plan file.

    The configuration comes with them, unless it is a plan file. Nodes are the cluster's; without one, those of the
    smallest GPU that holds a rank.
    """
    from meshwright.cli.plan_page import nodes_of_gpus
    from meshwright.plan.make_plan import make_plan
    from meshwright.plan.rules import load, read_plan

    source, overrides = split_words(words)
    if source is not None and source.endswith(".json"):
        if overrides:
            raise InputError(
                f"{overrides[0]} together with a plan file",
                where=where,
                rule="a plan is complete; overrides change a preset or a configuration file",
                fix=f"{source} alone, or the preset and overrides that it was made from",
            )
        return source, read_plan(Path(source), where=where), None
    config = load(source, overrides)
    ranks = config.mesh.axes().num_ranks()
    nodes = nodes_of_gpus(make_plan(config, checked=False)) if cluster is None else min(cluster.devices_per_node, ranks)
    return config.name, make_plan(config, nodes=nodes), config


def _figures(
    name: str, made: RunPlan, timed: RunPlan, config: RunConfig | None, cluster: Cluster | None
) -> dict[str, Any]:
    """Return the JSON output: bytes by type and purpose, optimizer groups, the hashes (`fingerprint`, `model` and
    `layout`), the plan itself and, with a cluster, the time of a step in seconds."""
    from meshwright.cli.plan_page import optimizer_groups
    from meshwright.plan.compare import hashes
    from meshwright.plan.cuda_memory import predict_cuda_memory
    from meshwright.plan.serialize import encode
    from meshwright.plan.traffic import predict_traffic

    memory, traffic, found = predict_cuda_memory(made), predict_traffic(made), hashes(made)
    return {
        "name": name,
        "fingerprint": found.fingerprint,
        "model": found.model,
        "layout": found.layout,
        "ranks": made.mesh.num_ranks(),
        "memory": {**vars(memory), **_totals(made, memory.total())},
        "traffic": {**{str(one.purpose): one.sent.total() for one in traffic.entries}, "total": traffic.sent().total()},
        "links": {str(one.purpose): vars(one.sent) for one in traffic.entries},
        "optimizer": optimizer_groups(made, config.train if config is not None else None),
        "plan": encode(made),
        **({} if cluster is None else {"time": _seconds(timed, config, cluster)}),
    }


def _totals(made: RunPlan, total: int) -> dict[str, Any]:
    """Return the bytes of a GPU in all, and reserved at least and at most, and those of a process on CPUs."""
    from meshwright.plan.cuda_memory import reserved_bytes
    from meshwright.plan.memory import predict_process_memory

    return {"total": total, "reserved": reserved_bytes(total), "on_cpu": predict_process_memory(made)}


def _seconds(made: RunPlan, config: RunConfig | None, cluster: Cluster) -> dict[str, Any]:
    """Return the time of a step in seconds: its total, interval, parts, and tokens per second and device."""
    from meshwright.cli.plan_page import is_captured
    from meshwright.plan.time.step_time import predict_step

    found = predict_step(made, cluster, captured=is_captured(config))
    return {
        "cluster": cluster.name,
        "source": cluster.performance.source,
        "total": found.total / 1e6,
        "low": found.low / 1e6,
        "high": found.high / 1e6,
        "parts": {part: us / 1e6 for part, us in found.parts.items()},
        "tokens_per_s": found.tokens_per_s(made.mesh.num_ranks()),
    }


def _draw(name: str, made: RunPlan, config: RunConfig | None, cluster: Cluster | None, path: Path) -> None:
    from meshwright.cli.plan_page import is_captured
    from meshwright.plan.figure import draw_plan

    draw_plan(name, made, path, cluster=cluster, captured=is_captured(config))


def _show_against(run: str, words: list[str] | None, cluster: Cluster | None) -> None:
    from meshwright.cli.plan_against import against

    folder = path_of("--against", run)
    assert folder is not None
    for line in against(folder, _plan_of(words)[1] if words else None, cluster):
        show(paint(line, "bold", sys.stdout) if line[0] != " " else line)


def _show_differences(first: RunPlan, second: RunPlan) -> None:
    from meshwright.plan.compare import differences

    changes = differences(first, second)
    for change in changes:
        for line in (change.path, f"  {change.first}", f"  {change.second}"):
            show(line)
    print(f"{counted(len(changes), 'field')} differ{'s' * (len(changes) == 1)}")
