"""`meshwright run`, `report`, `evaluate` and `generate`: train, and use what a run leaves.

`run` starts training, or runs as one rank under torchrun, SLURM or Kubernetes."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.config_arguments import Words, path_of, split_words
from meshwright.cli.wrapping import CLEAR_LINE, is_terminal, show
from meshwright.errors import InputError


def run(
    words: Words = None,
    out: Annotated[str | None, typer.Option(metavar="PATH", help="The run folder; default: runs/<name>-<n>.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto for the folder's newest valid checkpoint, or the path of a checkpoint.")
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
    from meshwright.plan.make_plan import make_plan
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
    from meshwright.train.launch.rank_context import DATA, RunSpec, StartTimes
    from meshwright.train.launch.rank_start import run_body

    reporter = partial(TerminalReporter, quiet=quiet, log_every=config.train.log_every)
    say = partial(_say_waiting, quiet=quiet)
    if context is None:
        where = {"out": start.out, "resume": start.resume}
        api.run(config, **where, plan=plan_path, reporter=reporter, on_interrupt=_say_stopping, say=say)
        return
    plan = None if plan_path is None else load_plan(plan_path, config)
    is_other = plan is not None and plan != make_plan(config, nodes=plan.mesh.nodes)
    say("reading the data")
    times = StartTimes()
    config.family.open_data(run_facts(config))
    times.end(DATA)
    spec = RunSpec(config, reporter, plan=plan, plan_given=is_other, out=start.out, resume=start.resume, start=times)
    run_as_rank(run_body, context, spec)


def _say_waiting(text: str, *, quiet: bool) -> None:
    """Show the reason for a wait at startup, on terminals only; the next line overwrites it."""
    if is_terminal(sys.stdout) and not quiet:
        print(f"{CLEAR_LINE}{text} …", end="", flush=True)


def _say_stopping() -> None:
    print("\nsaving and stopping after this step (press again to kill at once)", file=sys.stderr, flush=True)


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared with the first.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The page to write; default: report.html in the folder of the only run."
        ),
    ] = None,
) -> None:
    """Write a page on a run, or a comparison of several, that opens in any browser without a network."""
    from meshwright.errors import InputError
    from meshwright.output_files import check_output, write_output
    from meshwright.train.record.record_files import REPORT
    from meshwright.train.report import page

    if out is None and len(folders) > 1:
        raise InputError(
            f"no file for the comparison of {len(folders)} runs",
            where="command line, -o",
            rule="the report of a run goes into its folder; a comparison needs a name",
            fix="-o comparison.html",
        )
    text = page.report(folders)
    path = out or folders[0] / REPORT
    check_output(path, where=str(path))
    write_output(path, text, where=str(path))
    print(f"report  {path}")


MODEL_HELP = "A run folder, a checkpoint, or a folder in Hugging Face's format, then section.key=value …"
Model = Annotated[list[str], typer.Argument(metavar="RUN|CHECKPOINT|FOLDER [KEY=VALUE]...", help=MODEL_HELP)]


def evaluate(
    words: Model, as_json: Annotated[bool, typer.Option("--json", help="Print the loss as JSON.")] = False
) -> None:
    """Compute a trained model's validation loss, on the run's data or data.source=…, on any layout (mesh.…)."""
    from meshwright.train.trained_model import find_model, use

    source, given = _model_of(words)
    model = find_model(source, given)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        found = use(model, Path(folder))
    samples, where = model.config.train.validation_samples, str(model.checkpoint or source)
    if as_json:
        print(json.dumps({**found, "samples": samples, "model": where}))
        return
    show(f"validation {found['loss']:.3f} {found['unit']} · at most {samples} samples · {where}")


def generate(
    words: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue, or with --chat what a user says.")] = "def ",
    chat: Annotated[bool, typer.Option("--chat", help="Answer the prompt, by the tokenizer's chat template.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", "--max-new-tokens", min=1, help="Most tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    out: Annotated[Path, typer.Option(help="Folder for images, of a model that generates them.")] = Path("generated"),
) -> None:
    """Generate with a trained model, on one process: text after a prompt or an answer to it, or images."""
    from meshwright.models.contract.family import Prompt
    from meshwright.train.trained_model import find_model, use

    source, given = _model_of(words)
    model = find_model(source, given)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        found: dict[str, Any] = use(model, Path(folder), Prompt(prompt, tokens, temperature, chat))
        if "text" in found:
            print(found["text"] if chat else prompt + found["text"])
            return
        for file in found["files"]:
            out.mkdir(parents=True, exist_ok=True)
            show(str(shutil.copy(file, str(out))))


def _model_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the model and the overrides."""
    if "=" not in words[0]:
        return words[0], words[1:]
    raise InputError(
        f"{words[0]} comes before a model",
        where="command line",
        rule="a model comes first: a run folder, a checkpoint, or a folder in Hugging Face's format",
        fix=f"the path of one, such as runs/llama-tiny-1, before {words[0]}",
    )
