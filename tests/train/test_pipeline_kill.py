"""A rank of a pipelined run is killed or stands still: the run ends in time, and says which rank did what."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.helpers import small_corpus
from tests.train.runs import LIMIT_S, STEPS, is_alive, num_steps, rank_pids, start, wait_until

TIMEOUT_S = 6
ACTION = r"in step \d+, action \d+ \({stage}(F|B|SEND_F|SEND_B|RECV_F|RECV_B|FREE_IN|FREE_OUT|FREE_GRAD)\d"


@pytest.mark.parametrize(
    ("number", "what"),
    [
        (signal.SIGSTOP, "rank 1 was stopped (SIGSTOP, or a debugger)"),
        pytest.param(signal.SIGKILL, "rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_named_with_its_action(tmp_path, number, what):
    words = [*STEPS, *small_corpus(tmp_path / "corpus"), "mesh.pp=2", "train.num_microbatches=4", "checkpoint.every=0",
             "train.validate_every=0", "train.steps=100000", f"train.timeout_s={TIMEOUT_S}"]  # fmt: skip
    process = start(words, tmp_path / "run")
    wait_until(lambda: num_steps(tmp_path / "run") >= 3, timeout_s=60)
    pids = rank_pids(process.pid)
    began = time.monotonic()
    os.kill(pids[1], number)
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - began < LIMIT_S + (TIMEOUT_S if number == signal.SIGSTOP else 0)
    assert process.returncode == 1 and not any(map(is_alive, pids))
    assert stderr.startswith(f"error  {what}") and "of micro-batch" in stderr
    assert re.search(ACTION.format(stage=1), stderr), stderr
    assert "--resume auto" in stderr
