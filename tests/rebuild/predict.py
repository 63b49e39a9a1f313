"""What a checkout predicts of memory and traffic. The one file that knows how to ask; adapt it when that moves.

Run as a script in the environment of the checkout, so it imports nothing of these tests: reads a JSON list of command
lines (a preset and words each), and writes JSON: where `meshwright` was found, the way that was asked, and for each
command line its figures by name, or `refused` and what the checkout said.

Two ways. `api` is the functions of today, with every rank's traffic by purpose and link. `plan` is
`meshwright plan WORDS --json -`, which gives one rank's totals. Totals are named alike in both, so that a side with one
way is compared with a side of the other in what both know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

Figures = dict[str, Any]

RANKS_ASKED = 8
"""Of larger meshes one from the middle and the last are asked, beside the one that sends most."""


def main() -> None:
    """From standard input to standard output."""
    import meshwright

    lines, output = json.load(sys.stdin), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        way, ask = _way(lines[0])
        found = [ask(line) for line in lines]
    json.dump({"package": meshwright.__file__, "way": way, "figures": found}, output)


def _way(line: Sequence[str]) -> tuple[str, Callable[[Sequence[str]], Figures]]:
    """The first way that answers."""
    try:
        by_api(line)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        sys.stderr.write(f"predictions: the functions of before are gone ({error!r}); asking `meshwright plan`\n")
        return "plan", by_plan
    return "api", by_api


def by_api(line: Sequence[str]) -> Figures:
    """By functions."""
    from meshwright.errors import MeshwrightError
    from meshwright.plan.memory import predict_memory
    from meshwright.plan.traffic import predict_traffic

    load, make_plan = _functions()
    try:
        config = load(line[0], line[1:])
    except MeshwrightError as error:
        return {"refused": f"{type(error).__name__}, {error.where}"}  # its words may change
    plan = make_plan(config)
    figures: Figures = {f"memory.{name}": n for name, n in dataclasses.asdict(predict_memory(plan)).items()}
    most = predict_traffic(plan)
    figures |= {f"traffic.{entry.purpose.value}": entry.sent.total() for entry in most.entries}
    figures["rank that sends most"] = most.rank
    num_ranks = config.mesh.axes().num_ranks()
    for rank in range(num_ranks) if num_ranks <= RANKS_ASKED else (num_ranks // 2 - 1, num_ranks - 1):
        for entry in predict_traffic(plan, rank=rank).entries:
            for name in ("sent", "exact"):
                for link, num_bytes in dataclasses.asdict(getattr(entry, name)).items():
                    figures[f"rank {rank}: {entry.purpose.value}, {name}, {link}"] = num_bytes
    return figures


def _functions() -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """Find the functions that load a configuration and make its plan, by any of their modules' names."""
    for load, make in (("rules", "make_plan"), ("load_config", "make_plan"), ("load", "make")):
        if find_spec(f"meshwright.plan.{load}") and find_spec(f"meshwright.plan.{make}"):
            found = getattr(import_module(f"meshwright.plan.{load}"), "load", None)
            if found:
                return found, import_module(f"meshwright.plan.{make}").make_plan
    raise ImportError("no meshwright.plan.rules, .load_config or .load that has load")


def by_plan(line: Sequence[str]) -> Figures:
    """By the command, in this process: starting one for each would take minutes."""
    from meshwright.__main__ import main as command

    output, errors, kept = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["meshwright", "plan", *line, "--json", "-"]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            command()
        code: Any = 0
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = kept
    if code:
        return {"refused": errors.getvalue()}
    plan = json.loads(output.getvalue())
    kinds = ("memory", "traffic")
    return {f"{kind}.{name}": n for kind in kinds for name, n in plan[kind].items() if name != "total"}


if __name__ == "__main__":
    main()
