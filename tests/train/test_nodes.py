"""Two nodes on one machine, through the public command: under two torchrun agents, and as these start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.helpers import clean_environment, small_corpus
from tests.train.runs import STEPS, Hold, assert_bitwise_equal, descendants, is_alive, train, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gang")]  # whose server ranks are forked from

WAIT_S = 240.0
"""A loaded machine takes its time; who waits for a lost rank waits for train.timeout_s = 600."""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return [*STEPS, *small_corpus(tmp_path_factory.mktemp("corpus")), "train.steps=4"]


def start_nodes(words, out, *more, **environment):
    """The two agents. They meet at a file: a free port that a test finds may be taken when they want it."""
    meeting = Path(tempfile.mkdtemp(dir=out.parent)) / "meeting"  # closed once a start failed
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
             "--rdzv-backend", "c10d", "--rdzv-endpoint", str(meeting), "--rdzv-conf", "store_type=file",
             "--rdzv-id", "test", "--local-addr", "127.0.0.1", "-m", "meshwright", "run", *words, "--out", str(out),
             *more],
            env=clean_environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", **environment),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip


def ranks_of(node):
    """The processes of an agent that run our command."""
    lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(node.pid)}
    return [pid for pid, line in lines.items() if is_alive(pid) and b"meshwright\0run" in line.read_bytes()]


def test_a_rank_killed_on_one_node_ends_both(run_on_nodes, words, tmp_path):
    """And on two nodes it goes on from there, to what it would have been on one."""
    words, out = [*words, "mesh.tp=2"], tmp_path / "run"
    hold = Hold(tmp_path / "hold", rank=1, phase="step", step=4)
    nodes = start_nodes(words, out, **hold.environment())
    hold.wait()
    ranks = [pid for node in nodes for pid in ranks_of(node)]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    hold.release()  # if it was the other one
    wait_until(lambda: not any(map(is_alive, ranks)), timeout_s=WAIT_S)
    outputs = [node.communicate(timeout=WAIT_S) for node in nodes]
    assert all(node.returncode != 0 for node in nodes)
    errors = outputs[0][1] + outputs[1][1]
    assert re.search(r"rank \d lost another rank in (step \d+|saving|validating)", errors), errors
    assert "SIGKILL" in errors or "exitcode  : -9" in errors  # torchrun names the one that was killed
    ranks = run_on_nodes([*words, "--resume", "auto"], out, ranks_each=1)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    (tmp_path / "local").mkdir()
    train(words, tmp_path / "local")
    assert_bitwise_equal(out, tmp_path / "local")


@pytest.fixture
def run_on_nodes(forked_meshwright):
    """Runs the command as torchrun would start it on two nodes."""

    def run(words, out, *, ranks_each):
        store, num_ranks = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 2 * ranks_each
        environments = [
            clean_environment(
                RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank % ranks_each),
                LOCAL_WORLD_SIZE=str(ranks_each), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
                TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", GLOO_SOCKET_IFNAME="lo",
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        command = partial(forked_meshwright, "run", *words, "--out", out)
        with ThreadPoolExecutor(num_ranks) as ranks:
            return list(ranks.map(lambda environment: command(env=environment), environments))

    return run


def test_two_nodes_train_as_four_local_processes(run_on_nodes, words, tmp_path):
    words = [*words, "mesh.dp_shard=4"]
    (tmp_path / "local").mkdir()
    train(words, tmp_path / "local")
    ranks = run_on_nodes(words, tmp_path / "nodes", ranks_each=2)
    assert [rank.returncode for rank in ranks] == [0] * 4, ranks
    assert_bitwise_equal(tmp_path / "nodes", tmp_path / "local")
    shown = "".join(rank.stdout for rank in ranks)
    assert shown.count("mesh dp_shard 4 = 4 processes (cpu, gloo)") == 1  # one rank speaks


def test_bad_input_on_nodes_is_said_and_ends_it(run_on_nodes, words, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    ranks = run_on_nodes([*words, "mesh.tp=2"], tmp_path, ranks_each=1)
    assert all(rank.returncode != 0 for rank in ranks)
    errors = "".join(rank.stderr for rank in ranks)
    assert "already holds a run" in errors and errors.count(", which continues it; or another --out") == 1
