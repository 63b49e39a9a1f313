"""A run that is stopped, and continued by the command that it prints, is bit for bit the run that was not."""

from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from meshwright.train.launch.rank_context import StatusBoard
from tests.forked_command import forked_meshwright
from tests.fuzz.case import Case
from tests.fuzz.commands import TIMEOUT_S, Commands
from tests.fuzz.judge import Verdict, judge
from tests.train.runs import assert_bitwise_equal, wait_until

STOP_AFTER = Path("stop-after")
"""File in the current folder with the step after which a run is to stop."""
STEPS = 4
WORDS = (f"train.steps={STEPS}", 'train.trackers=["tests.fuzz.stopped:Stopper"]')
STOPPED = 3
"""Exit code of a run that stopped as requested."""


class Stopper:
    """Sink that asks the run's command to stop, as a scheduler does."""

    def start(self, run: object) -> None:
        """Do nothing: the folder of the case is the current one."""

    def log(self, step: int, values: object) -> None:
        """Send SIGTERM to the command once, and wait until it has told the ranks, on the board that they share."""
        if STOP_AFTER.exists() and int(STOP_AFTER.read_text()) <= step:
            STOP_AFTER.unlink()
            os.kill(os.getppid(), signal.SIGTERM)
            boards = [one for one in gc.get_objects() if isinstance(one, StatusBoard)]
            wait_until(lambda: any(board.stop_requested() for board in boards))

    def close(self, failed: bool) -> None:
        """Do nothing: no file is open."""


def judge_stopped(run: Commands, case: Case, *, seed: int = 0) -> Verdict:
    """Run a case undisturbed, and again with a stop; continue it by what it prints, and compare the two.

    Every second case starts from the file of the undisturbed run in place of the preset.
    """
    verdict = judge(run, case.with_words(WORDS), seed=seed, compares=False)
    if verdict.failure or verdict.action:
        return verdict
    rng, source = Random(seed), [verdict.case.preset, *verdict.case.words]
    whole, out = run.folder / "whole", run.folder / "run"
    shutil.rmtree(whole, ignore_errors=True)
    typed(run.folder, ["run", *source, "--out", "whole"])
    if seed % 2:
        shutil.copy(whole / "config.toml", run.folder / "case.toml")
        source = ["case.toml"]
    shutil.rmtree(out, ignore_errors=True)
    (run.folder / STOP_AFTER).write_text(str(rng.randint(1, STEPS - 2)))
    stopped = typed(run.folder, ["run", *source, "--out", "run"])
    if stopped.returncode != STOPPED:
        return replace(verdict, failure=f"exit code {stopped.returncode} of a stopped run", detail=stopped.stderr)
    printed = re.search(r"^fix +(meshwright run .+?), which continues", stopped.stderr, re.M)
    if printed is None:
        return replace(verdict, failure="no command continues it", detail=stopped.stderr)
    continued = typed(run.folder, shlex.split(printed[1])[1:])
    if continued.returncode:
        return replace(verdict, failure=f"{printed[1]} fails", detail=continued.stdout + continued.stderr)
    try:
        assert_bitwise_equal(out, whole)
    except AssertionError as error:
        return replace(verdict, failure="the continued run is another", detail=str(error))
    return verdict


def typed(folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command as it is typed in the folder of the cases."""
    return forked_meshwright(*words, cwd=folder, timeout_s=TIMEOUT_S)
