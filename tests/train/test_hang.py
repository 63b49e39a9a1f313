"""A rank that goes on living but does not come: the run ends in time, and says in what the others waited."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.distributed import distributed_c10d

from meshwright.errors import CONTINUE, RunError
from meshwright.plan.rules import load
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.rank_context import RunSpec
from meshwright.train.record.reporter import Reporter
from tests.helpers import clean_environment, small_corpus
from tests.train.runs import STEPS, choose, is_alive, wait_until

TIMEOUT_S = 600
"""The default of `train.timeout_s`."""
PATIENCE_S = 10
"""How long the others wait for a rank that will not come, once it is known that it will not."""


def wait_no_longer_than(seconds):
    """From now on, this rank's collectives time out after a moment."""
    for group in distributed_c10d._world.pg_map:
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=TIMEOUT_S)
        group.set_timeout(timedelta(seconds=seconds))


class SleepyBoard:
    """A board on which posting rank 1's third step takes for ever; the other ranks know that."""

    def __init__(self, board):
        self._board = board

    def __getattr__(self, name):
        return getattr(self._board, name)

    def post(self, rank, phase, step):
        self._board.post(rank, phase, step)
        if (phase, step) == ("step", 3):
            if rank == 1:
                time.sleep(600)
            wait_until(lambda: self._board.place(1) == "step 3")
            wait_no_longer_than(PATIENCE_S)


def sleepy_body(context, argument):
    from meshwright.train.rank_run import run_rank

    spec, folder = argument
    (folder / f"pid-{context.rank}").write_text(str(os.getpid()))
    run_rank(replace(context, board=SleepyBoard(context.board)), spec)


CASES = {
    "compressed": (
        ["mesh.dp_shard=2", "comm.gradients=loco4", "comm.weights=int8"],
        r"all_gather, number \d+",
        r"step\.py",
    ),
    "sharded, with tp": (["mesh.dp_shard=2", "mesh.tp=2"], r"\w+, sequence number \d+", r"step\.py"),
    "pipeline": (["mesh.pp=2", "train.num_microbatches=4"], r"(send|receive), number \d+", r"execute\.py"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("gang")  # whose server ranks are forked from
@pytest.mark.parametrize("name", list(CASES))
def test_a_rank_that_does_not_come_ends_the_run(tmp_path, name):
    layout, collective, file = CASES[name]
    words = [*STEPS, *small_corpus(tmp_path / "corpus"), *layout]
    config, out = load(None, words), tmp_path / "run"
    num_ranks = config.mesh.axes().num_ranks()
    spec = RunSpec(config, Reporter, folder=choose(words, out=out, resume=None))
    with pytest.raises(RunError) as caught:
        launch(sleepy_body, (spec, out), num_ranks=num_ranks, threads=1, on_interrupt=lambda: None)
    error = caught.value
    assert not any(is_alive(int(path.read_text())) for path in out.glob("pid-*"))
    # Where others wait for those that wait for rank 1, any of them may be the first to give up.
    groups = "(0, 1|1, 3|0, 2|2, 3)"
    told = rf"rank \d timed out [after\d. s]*in {collective} in the group of ranks {groups}, of (float|uint8)"
    assert re.match(told, error.what), error.what
    assert re.search(rf"called at\n.*{file}:\d+ in \w+\n", error.where, re.DOTALL)
    assert "rank 1: reported no failed collective" in error.where
    assert re.search(r"all ranks: rank 0: step 3.*; rank 1: step 3", error.where), error.where
    assert error.exit_code == 1 and CONTINUE in error.fix


@pytest.mark.slow
def test_a_run_whose_ranks_compare_their_collectives_ends_well(forked_meshwright, tmp_path):
    words = [*STEPS, *small_corpus(tmp_path / "corpus"), "mesh.pp=2", "mesh.dp_shard=2", "train.num_microbatches=2",
             "train.steps=2"]  # fmt: skip
    environment = clean_environment(MESHWRIGHT_DEBUG_COLLECTIVES="1")
    process = forked_meshwright("run", *words, "--out", tmp_path / "run", env=environment, timeout_s=300)
    assert process.returncode == 0, process.stderr
