"""No import of the server that ranks are forked from starts CUDA; where one does, ranks start without the fork."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from unittest import mock

import pytest

from meshwright.config.load import load
from meshwright.models.contract.family import family_names
from meshwright.optim.catalogue import BUILT_IN
from meshwright.train.launch import launcher
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import STARTED_CUDA, RankContext
from meshwright.train.record.trackers import SINKS
from tests.helpers import clean_environment
from tests.train.test_launcher import WAIT_S, launched

CUDA_MODULE = "tests.train.cuda_at_import"


def tell_start(context: RankContext, folder):
    """Write whether this rank was forked from a server, and what was noted."""
    forked = os.getppid() != multiprocessing.parent_process().pid
    (folder / f"rank-{context.rank}").write_text(f"{forked} {' '.join(context.notes)}")


def say_cuda_started(sender):
    """What the server of gangs would say, had one of its imports started CUDA."""
    sender.send(CUDA_MODULE)


@pytest.mark.slow
def test_ranks_are_not_forked_where_an_import_started_cuda(tmp_path, monkeypatch):
    def starts():
        launch(tell_start, tmp_path, num_ranks=2, threads=1)
        return {path.read_text() for path in tmp_path.glob("rank-*")}

    assert starts() == {"True "}
    monkeypatch.setattr(launcher, "send_started_cuda", say_cuda_started)
    (said,) = starts()
    assert said.startswith(f"False importing {CUDA_MODULE} starts CUDA")


def noted_import(rank, world_size):
    """The module that is noted when it is imported, on a pretended device."""
    import torch

    from meshwright.train.launch.rank_imports import call_before_cuda, note_importing

    def device(name):
        return mock.patch.object(torch._C, name, lambda: 1, create=True)

    with device("_cuda_init"), device("_cuda_getDeviceCount"), mock.patch.dict(os.environ, {STARTED_CUDA: ""}):
        call_before_cuda(note_importing)
        before = os.environ[STARTED_CUDA]
        importlib.import_module(CUDA_MODULE)
        return before, os.environ[STARTED_CUDA]


def test_an_import_that_starts_cuda_is_noted(gang):
    assert gang(2).run(noted_import) == [("", CUDA_MODULE)] * 2


NO_CUDA = """
import importlib, os, sys, traceback
import torch, torch.cuda.memory, torch.cuda.random
from meshwright.train.launch.launcher import rank_environment

def start(*arguments, **named):
    traceback.print_stack()
    os._exit(1)

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
lazy_init = torch.cuda._lazy_init
for module in [module for name, module in sys.modules.items() if name.startswith("torch.cuda")]:
    if vars(module).get("_lazy_init") is lazy_init:
        module._lazy_init = start
with rank_environment(1):
    for name in sys.argv[1:]:
        importlib.import_module(name)
"""
"""Imports modules where there seems to be a device, and fails when one of them uses it."""

SETTINGS = [
    *([preset] for preset in ("llama-tiny", "moe-tiny", "dit-digits", "hf-tiny", "module-tiny")),
    *(["llama-tiny", f"train.optimizer={name}"] for name in BUILT_IN),
    *(["llama-tiny", f"float8.recipe={name}"] for name in ("current", "delayed")),
    *(["llama-tiny", f"train.trackers={name}"] for name in SINKS),
    ["hf-tiny", "lora.rank=4"],
]
"""Every family, optimizer, recipe of float8 and tracker, and adapters."""


def import_all(modules, folder=""):
    """Import modules where there seems to be a device: the exit code, and the stack in which CUDA was started."""
    command = [sys.executable, "-c", NO_CUDA, *modules]
    env = clean_environment() | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=WAIT_S)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_no_import_of_the_fork_server_starts_cuda():
    """With every extra that is installed: what the server imports depends on the settings alone."""
    configs = [load(preset, words) for preset, *words in SETTINGS]
    assert {config.model.kind for config in configs} == set(family_names())
    modules = dict.fromkeys([*launcher.PRELOAD, *(name for config in configs for name in config.family.preload)])
    assert "meshwright.models.hf.preload" in modules
    code, shown = import_all(modules)
    assert code == 0, shown


@pytest.mark.slow
def test_an_import_that_starts_cuda_is_caught(tmp_path):
    """By the check of the one before: torch's own question for a device's properties, at import."""
    (tmp_path / "asks.py").write_text("import torch; torch.cuda.get_device_properties(0)")
    code, shown = import_all(["asks"], tmp_path)
    assert code == 1 and "asks.py" in shown


TELL = """
import sys

def tell(context, argument):
    print(*context.notes, "touches" in sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_launched_program_says_which_import_started_cuda(tmp_path):
    (tmp_path / "pretended.py").write_text("import torch; torch._C._cuda_getDeviceCount = lambda: 1")
    (tmp_path / "touches.py").write_text("import torch; torch._C._cuda_getDeviceCount()")
    (tmp_path / "tells.py").write_text(TELL)
    preload = ["pretended", *launcher.PRELOAD, "touches"]
    [line] = launched(tmp_path, preload=preload, body="tells:tell", num_ranks=1).splitlines()
    assert line.startswith("importing touches starts CUDA") and line.endswith("False")
