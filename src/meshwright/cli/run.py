"""`meshwright run`: start training, or run as one rank under torchrun, SLURM or Kubernetes."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.config_arguments import Words, path_of, split_words
from meshwright.cli.wrapping import CLEAR_LINE, is_terminal


def run(
    words: Words = None,
    out: Annotated[str | None, typer.Option(metavar="PATH", help="The run folder; default: runs/<name>-<n>.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="auto for the folder's newest valid checkpoint, or the path of a checkpoint."),
    ] = None,
    plan_path: Annotated[
        Path | None, typer.Option("--plan", help="Run this plan, written by meshwright plan -o and possibly edited.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Train: start the processes of the mesh on this machine, or join those that a launcher started.

    A run folder (runs/llama-tiny-1) continues its run.
    """
    from meshwright import api
    from meshwright.config.facts_for_family import run_facts
    from meshwright.plan.rules import load, load_plan
    from meshwright.train.continued_run import check_source, find_start
    from meshwright.train.launch.launcher import context_from_environment, run_as_rank

    path_of("--resume", resume)
    source, overrides = split_words(words)
    start = find_start(source, path_of("--out", out), resume)
    context = context_from_environment()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal ends no run; ranks inherit this
    config = load(start.source, overrides, num_ranks=context.num_ranks if context else None)
    check_source(start, config, overrides)

    # The configuration is valid, so the cost of importing numpy is acceptable from here on.
    from meshwright.cli.progress import TerminalReporter
    from meshwright.train.launch.rank_context import RunSpec
    from meshwright.train.launch.rank_start import run_body

    reporter = partial(TerminalReporter, quiet=quiet, log_every=config.train.log_every)
    say = partial(_say_waiting, quiet=quiet)
    if context is None:
        where = {"out": start.out, "resume": start.resume}
        api.run(config, **where, plan=plan_path, reporter=reporter, on_interrupt=_say_stopping, say=say)
        return
    plan = None if plan_path is None else load_plan(plan_path, config)
    say("reading the data")
    config.family.open_data(run_facts(config))
    run_as_rank(run_body, context, RunSpec(config, reporter, plan=plan, out=start.out, resume=start.resume))


def _say_waiting(text: str, *, quiet: bool) -> None:
    """Show the reason for a wait at startup, on terminals only; the next line overwrites it."""
    if is_terminal(sys.stdout) and not quiet:
        print(f"{CLEAR_LINE}{text} …", end="", flush=True)


def _say_stopping() -> None:
    print("\nsaving and stopping after this step (press again to kill at once)", file=sys.stderr, flush=True)
