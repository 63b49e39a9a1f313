"""Wrong options and arguments of any command end in an error with location, rule and fix, and the fix is valid."""

from __future__ import annotations

import shlex

import pytest
import typer.main

from meshwright.cli.main import app
from meshwright.cli.usage_errors import OwnErrors
from tests.helpers import shown_error


@pytest.fixture
def fails(here):
    """Runs a command that must fail with bad input, and gives the parts of the error."""

    def run(command):
        done = here(*shlex.split(command))
        assert done.returncode == 2 and done.stdout == "", done
        return shown_error(done.stderr)

    return run


CASES = {
    "--versoin": ("unknown option --versoin", "--version"),
    "presets --device": ("unknown option --device", "--devices"),
    "doctor --verbose": ("unknown option --verbose", "meshwright doctor --help"),
    "draw pipeline 1f1b --stagse 4": ("unknown option --stagse", "--stages"),
    "draw reshard S0 R --mesh 4 --shape 8 --dtyp f32": ("unknown option --dtyp", "--dtype"),
    "checkpoint ls x --json y": ("unknown option --json", "meshwright checkpoint ls --help"),
    "draw pipelnie 1f1b": ("unknown command pipelnie", "meshwright draw pipeline 1f1b"),
    "checkpoint veriyf x": ("unknown command veriyf", "meshwright checkpoint verify x"),
    "launch no-such": ("unknown command no-such", "meshwright launch --help"),
    "draw pipeline": ("missing argument SCHEDULE", "meshwright draw pipeline SCHEDULE"),
    "draw loss": ("missing argument RUN...", "meshwright draw loss RUN..."),
    "checkpoint ls": ("missing argument FOLDER", "meshwright checkpoint ls FOLDER"),
    "bench": ("missing argument PART", "meshwright bench PART"),
    "draw reshard S0 R": ("missing option --mesh", "meshwright draw reshard FROM TO --mesh 4,8 --shape 8192,8192"),
    "launch slurm llama3-8b": ("missing option --nodes", "meshwright launch slurm --nodes 2 --gpus-per-node 8"),
    "presets llama-tiny extra": ("unexpected argument extra", "meshwright presets --help"),
    "checkpoint import a b c": ("unexpected argument c", "meshwright checkpoint import --help"),
    "draw pipeline 1f1b --stages four": ("--stages four is not allowed", "--stages 4"),
    "draw capture 1f1b --rank=-1": ("--rank -1 is not allowed", "--rank 0"),
    "draw capture 1f1b --mode slots": ("--mode slots is not allowed", "--mode slot"),
    "draw loss x --window x": ("--window x is not allowed", "--window 10"),
    "bench train --device gpu": ("--device gpu is not allowed", "--device auto"),
    "bench train --rounds 0": ("--rounds 0 is not allowed", "--rounds 5"),
    "launch slurm --nodes two --gpus-per-node 8": ("--nodes two is not allowed", "--nodes 2"),
    "prove --steps 0": ("--steps 0 is not allowed", "--steps 3"),
    "prove --steps": ("--steps has no value", "--steps 3"),
    "run --plan": ("--plan has no value", "--plan PLAN"),
    "plan --json": ("--json has no value", "--json JSON"),
    "draw reshard S0 R --mesh": ("--mesh has no value", "--mesh 4,8"),
}


@pytest.mark.parametrize("command", CASES)
def test_usage_errors(fails, command):
    error = fails(command)
    assert (error["error"], error["fix"]) == CASES[command]
    assert error["where"].startswith("command line") and "\n" not in error["rule"]
    assert "unable to parse" not in error["rule"] and "Value error" not in error["rule"]


def commands(group, path=()):
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def test_every_command_has_such_errors():
    root = typer.main.get_command(app)
    assert isinstance(root, OwnErrors)
    without = [path for path, command in commands(root) if not isinstance(command, OwnErrors)]
    assert not without
