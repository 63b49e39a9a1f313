"""The `meshwright` command. Subcommands import lazily, so that help and errors appear instantly."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import typer

from meshwright import __version__
from meshwright.cli import calibrate, config_arguments, doctor, plan, prove, run
from meshwright.cli.usage_errors import Command, Commands, ConfigCommand, commands_of
from meshwright.cli.wrapping import CLEAR_LINE, is_terminal, paint, show, tolerate
from meshwright.errors import InputError, MeshwrightError
from meshwright.lasting_output import lasting_output, unwritten


def add_bench(app: typer.Typer) -> None:
    """Add the command of the package `meshwright-bench` if it is installed, else one that says how to install it."""
    if find_spec("meshwright_bench") is None:
        app.command("bench", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(bench)
    else:
        from meshwright_bench.command import bench as measure

        app.command("bench", cls=Command)(measure)


def bench(context: typer.Context) -> None:
    """Measure a part of Meshwright against the obvious alternative (needs the package meshwright-bench)."""
    raise InputError(
        "the benchmarks are not installed",
        where="meshwright bench",
        rule="the benchmarks are the package meshwright-bench, in the folder bench/ of the repository",
        fix="pip install ./bench, in a clone of the repository",
    )


app = typer.Typer(
    name="meshwright",
    cls=Commands,
    help="Train transformers on any number of devices: plan it, prove it, run it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=ConfigCommand)(plan.plan)
app.command(cls=ConfigCommand)(run.run)
app.command(cls=ConfigCommand)(prove.prove)
app.command("prove script", cls=Command)(prove.prove_script)
app.command(cls=ConfigCommand)(run.evaluate)
app.command(cls=ConfigCommand)(run.generate)
app.command(cls=Command)(run.report)
app.command(cls=Command)(config_arguments.presets)
app.command(cls=Command)(config_arguments.keys)
app.command(cls=Command)(calibrate.calibrate)
app.command(cls=Command)(doctor.doctor)
add_bench(app)
for name, purpose in {
    "draw": "Draw schedules, CUDA graphs, redistributions, losses and the catalogue of models.",
    "checkpoint": "List, verify, export and import checkpoints.",
    "launch": "Write the script that starts a run on a cluster; nothing is submitted.",
}.items():
    group = commands_of(f"meshwright.cli.{name}")
    app.add_typer(typer.Typer(cls=group, help=purpose, no_args_is_help=True), name=name)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line; exit with 1 if a run or proof failed, 2 on bad input, 3 after a requested stop."""
    tolerate(sys.stdout, sys.stderr)
    with lasting_output():
        try:
            app()
        except MeshwrightError as error:
            show_error(error)
            sys.exit(error.exit_code)
        except SystemExit:
            if (lost := unwritten()) is not None and sys.argv[1:2] != ["run"]:  # a run's files have it all
                rule, fix = "what a command prints is its result", "free some space there, or write to another file"
                show_error(
                    MeshwrightError(f"stdout can't be written: {lost.strerror}", where="stdout", rule=rule, fix=fix)
                )
                sys.exit(1)
            raise


def show_error(error: MeshwrightError) -> None:
    """Print an error to stderr."""
    sys.stdout.flush()
    if is_terminal(sys.stderr):
        print(CLEAR_LINE, end="", file=sys.stderr)  # there may be an unfinished progress line
    parts = (("error", error.what), ("where", error.where), ("rule", error.rule), ("fix", error.fix))
    for label, text in parts:
        if text:
            style = "red" if label == "error" else "bold"
            for number, line in enumerate(text.splitlines()):
                shown = f"{paint(f'{label:<5}', style, sys.stderr)}  {line}" if number == 0 else line
                if label in ("where", "fix"):  # paths and commands are copied
                    print(shown, file=sys.stderr)
                else:
                    show(shown, sys.stderr, more=" " * 7)
