"""`meshwright doctor` says what is here, and how to get what is missing, also where little works."""

from __future__ import annotations

import resource
import shutil
import socket
import subprocess
import sys
import tomllib
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.cli import doctor
from tests.helpers import clean_environment


def findings():
    return {finding.name: finding for finding in doctor._findings()}


def test_a_machine_that_can_train(here):
    done = here("doctor", torch=True)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    for name in ("torch", "gloo", "open files", "torchrun", "python", "tokenizers"):
        assert name in done.stdout


def test_without_torch_it_says_how_to_get_it(here):
    done = here("doctor")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    [(line, fix)] = [pair for pair in pairwise(lines) if "✗" in pair[0]]
    assert "torch" in line and "does not import" in line and "torch" in fix


@pytest.mark.slow
def test_few_files_may_be_open():
    """A process that may open very few files still gets an answer, and the fix."""
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 24; {sys.executable} -m meshwright doctor"],
        capture_output=True, text=True, env=clean_environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    assert "24 (hard limit 24)" in done.stdout and "ulimit -n" in done.stdout


def test_no_limit_on_files_is_fine(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = findings()["open files"]
    assert found.state == "ok" and "unlimited" in found.text and "-1" not in found.text


def test_it_looks_for_all_that_the_package_declares():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    names = [word.partition(">")[0] for word in project["dependencies"]]
    extras = {name: words[0].partition(">")[0] for name, words in project["optional-dependencies"].items()}
    assert sorted(names) == sorted(doctor.REQUIRED)
    assert extras == {**doctor.EXTRAS, "dev": "accelerate"}


@pytest.mark.parametrize("name", doctor.REQUIRED)
def test_a_missing_package_is_named(monkeypatch, name):
    version = metadata.version

    def without(package):
        if package == name:
            raise metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(metadata, "version", without)
    monkeypatch.setattr(doctor, "_torch", lambda: iter(()))
    found = findings()[name]
    assert found.state == "missing" and found.text == "not installed" and name in found.fix


def test_a_full_disk_is_noted(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    assert findings()["disk"].state == "note" and "--out" in findings()["disk"].fix


def test_a_host_name_that_does_not_resolve(monkeypatch):
    def fails(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", fails)
    assert findings()["torchrun"].state == "note" and "/etc/hosts" in findings()["torchrun"].fix


def test_no_compiler_is_noted(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert findings()["compiler"].state == "note" and "g++" in findings()["compiler"].fix
