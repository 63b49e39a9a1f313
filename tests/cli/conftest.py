"""Ways to run the command: as a process where importing torch raises, and within this one, likewise."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache, partial

import pytest
import typer.main

from meshwright.cli.main import main
from tests.helpers import clean_environment, shown_error

COMMANDS = cache(typer.main.get_command)
"""The tree of commands, which Typer makes anew in each call, as long as many a command takes."""


@dataclass(frozen=True)
class Outcome:
    """What a command said."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def no_torch(tmp_path_factory):
    """An environment in which importing torch is an error."""
    folder = tmp_path_factory.mktemp("no-torch")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('torch was imported')\n")
    return clean_environment(PYTHONPATH=str(folder))


@pytest.fixture
def here(monkeypatch, capsys, tmp_path):
    """Runs the command in this process, in an empty folder."""

    def run(*words, torch=False, **environment):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["meshwright", *map(str, words)])
            patch.setattr(typer.main, "get_command", COMMANDS)
            if not torch:
                patch.setitem(sys.modules, "torch", None)
            patch.chdir(tmp_path)
            for name in os.environ.keys() - clean_environment().keys():
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            code = 0
            try:
                main()
            except SystemExit as ended:
                code = ended.code or 0
        output = capsys.readouterr()
        return Outcome(code, output.out, output.err)

    return run


@pytest.fixture
def refused(here):
    """Runs a command in this process, which must fail with bad input, and gives the parts of the error."""

    def run(*words, **environment):
        done = here(*words, **environment)
        assert done.returncode == 2 and done.stdout == "", done
        return shown_error(done.stderr)

    return run


@pytest.fixture
def draws(here, request):
    """Runs `meshwright draw WHAT …`, with WHAT the test module's, which must succeed."""

    def run(*words, **environment):
        done = here("draw", request.module.WHAT, *words, **environment)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def fails(refused, request):
    """Runs `meshwright draw WHAT …`, which must fail with bad input, and gives the parts of the error."""
    return partial(refused, "draw", request.module.WHAT)
