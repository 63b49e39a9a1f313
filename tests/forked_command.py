"""The command in a process forked from the server of gangs, which has imported torch: it starts seconds sooner.

For tests of what a run computes, prints or leaves. How the command itself starts, imports and is killed needs a process
of its own: `tests.helpers.meshwright`. Ranks are forked from the command, which is what the server is elsewhere.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from tests.helpers import clean_environment


def forked_meshwright(
    *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; what it and its ranks print is returned."""
    arguments = ["meshwright", *map(str, words)]
    environment = dict(env if env is not None else clean_environment())
    with TemporaryDirectory(prefix="command-") as name:
        outputs = [Path(name) / stream for stream in ("stdout", "stderr")]
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(arguments, environment, cwd or Path.cwd(), outputs)
        )
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout_s)
        stdout, stderr = (output.read_text("utf-8") for output in outputs)
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


def _run(arguments: Sequence[str], environment: dict[str, str], cwd: Path, outputs: Sequence[Path]) -> None:
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ |= environment
    os.chdir(cwd)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = list(arguments)
    fork = multiprocessing.get_context("fork")
    with mock.patch.object(multiprocessing, "get_context", lambda method: fork):
        from meshwright.cli.main import main

        main()
