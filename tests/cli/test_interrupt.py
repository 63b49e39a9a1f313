"""Ctrl-C amid our imports ends the command quietly, at whichever module it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from tests.helpers import clean_environment, quick_and_slow

# Python imports it before anything else: the signal is sent when the import of INTERRUPTED_MODULE begins.
SITECUSTOMIZE = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_MODULE"]:
            print("interrupted", flush=True)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
"""


COMMANDS = {"module": [sys.executable, "-m", "meshwright"], "script": [Path(sys.executable).parent / "meshwright"]}


MODULES = ["meshwright.cli.main", "typer", "meshwright.pipeline.schedule_table", "pydantic", "numpy"]


@pytest.mark.parametrize(
    ("module", "command"),
    quick_and_slow(
        zip(MODULES, cycle(COMMANDS), strict=False), [("meshwright.cli.main", "module"), ("pydantic", "script")]
    ),
)
def test_an_interrupt_amid_imports_is_quiet(command, module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    ended = subprocess.run(
        [*COMMANDS[command], "prove", "llama-tiny"], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(tmp_path), INTERRUPTED_MODULE=module),
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )  # fmt: skip
    assert ended.stdout == "interrupted\n"
    assert (ended.returncode, ended.stderr) == (130, "")
