"""`meshwright run`: start a training, or be one rank of it under torchrun, SLURM or Kubernetes."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.style import CLEAR_LINE, is_terminal
from meshwright.cli.words import WORDS_HELP, path_of, split_words

if TYPE_CHECKING:
    from meshwright.train.context import RankContext
    from meshwright.train.runspec import RunSpec


def run(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PRESET|FILE.toml] [KEY=VALUE]...", help=WORDS_HELP)
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="PATH", help="The run folder; runs/<name>-<n> when left out.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: go on from the folder's newest valid checkpoint; or a checkpoint's path.")
    ] = None,
    plan_path: Annotated[
        Path | None, typer.Option("--plan", help="Do what this plan says: of meshwright plan -o, or changed by hand.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Train: start the processes that the mesh needs here, or join those that a launcher started."""
    from meshwright.config.facts import run_facts
    from meshwright.plan.adopt import adopt_plan
    from meshwright.plan.load import load
    from meshwright.plan.make import make_plan
    from meshwright.train.launch import context_from_environment, launch, run_as_rank

    path = path_of("--out", out)
    path_of("--resume", resume)
    source, overrides = split_words(words)
    context = context_from_environment()
    config = load(source, overrides, num_ranks=context.num_ranks if context else None)

    # The configuration is right: from here on numpy may be imported.
    from meshwright.cli.progress import TerminalReporter
    from meshwright.train.folder import choose_folder
    from meshwright.train.machine import check_machine
    from meshwright.train.runspec import RunSpec

    num_ranks = config.mesh.axes().num_ranks()
    plan = None if plan_path is None else adopt_plan(plan_path, config)
    made = plan or make_plan(config)
    if context is None:
        check_machine(config, made)
    _say_waiting("reading the corpus", quiet=quiet)
    corpus = config.family.open_data(run_facts(config))
    reporter = partial(TerminalReporter, quiet=quiet, log_every=config.train.log_every)
    if context is not None:
        run_as_rank(run_body, context, RunSpec(config, reporter, plan=plan, out=path, resume=resume))
        return
    with ExitStack() as hold:
        folder = choose_folder(config, out=path, resume=resume, corpus=corpus.fingerprint, hold=hold)
        _say_waiting(f"starting {num_ranks} process{'es' if num_ranks > 1 else ''}", quiet=quiet)
        launch(
            run_body,
            RunSpec(config, reporter, plan=made, folder=folder),
            num_ranks=num_ranks,
            threads=config.train.threads,
            on_interrupt=_say_stopping,
            describe_action=made.action_words,
        )


def run_body(context: RankContext, spec: RunSpec) -> None:
    """What each rank runs; imports torch only there."""
    from meshwright.train.run import run_rank

    run_rank(context, spec)


def _say_waiting(text: str, *, quiet: bool) -> None:
    """What the start waits for, on a terminal; the first line after it takes its place."""
    if is_terminal(sys.stdout) and not quiet:
        print(f"{CLEAR_LINE}{text} …", end="", flush=True)


def _say_stopping() -> None:
    print("\nstopping after this step, saved (again to end at once)", file=sys.stderr, flush=True)
