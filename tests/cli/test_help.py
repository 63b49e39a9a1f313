"""Help, version and presets answer without torch; what they print is plain off a terminal and true."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from meshwright.config.source import preset_names
from meshwright.plan.rules import load
from tests.helpers import meshwright

VERBS = (["run"], ["prove"], ["report"], ["launch"], ["launch", "slurm"], ["launch", "kubernetes"],
         ["launch", "torchrun"], ["presets"], ["doctor"], ["bench"], ["draw"], ["draw", "pipeline"],
         ["checkpoint"], ["checkpoint", "ls"], ["checkpoint", "verify"], ["checkpoint", "export"],
         ["checkpoint", "import"])  # fmt: skip


def test_help_needs_no_torch(no_torch):
    done = meshwright("--help", env=no_torch)
    assert done.returncode == 0 and "\x1b" not in done.stdout and done.stderr == ""
    for verb in VERBS:
        assert verb[0] in done.stdout


def test_the_commands_are_known_without_what_they_import():
    """Help, completion and errors of usage answer at once: numpy and pydantic would take twice as long as the rest."""
    code = "import sys, meshwright.cli.main; print({'torch', 'numpy', 'pydantic', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("words", [*([*verb, "--help"] for verb in VERBS), ["-h"], ["run", "-h"]])
def test_every_verb_has_help(here, words):
    done = here(*words)
    assert done.returncode == 0 and "Usage" in done.stdout and "\x1b" not in done.stdout


def test_version(here):
    from importlib.metadata import version

    assert here("--version").stdout == f"meshwright {version('meshwright')}\n"


def test_presets_are_listed(here):
    lines = here("presets").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["preset", *preset_names()]
    assert "70.6 B" in next(line for line in lines if line.startswith("llama3-70b"))


@pytest.mark.parametrize("name", preset_names())
def test_a_printed_preset_loads_again(here, tmp_path, name):
    text = here("presets", name, torch=load(name).family.derives).stdout
    assert tomllib.loads(text)["name"] == name
    (tmp_path / "again.toml").write_text(text)
    assert load(str(tmp_path / "again.toml")) == load(name)


def test_devices_are_listed(here):
    lines = here("presets", "--devices").stdout.splitlines()
    assert "TFLOP/s" in lines[0] and all(len(line.split()) == 10 for line in lines[2:])
    assert "10000" in next(line for line in lines if line.startswith("GB200"))
