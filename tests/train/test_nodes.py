"""Two nodes on one machine: two torchrun agents with two ranks each, through the public command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import list_checkpoints
from tests.helpers import clean_environment, small_corpus
from tests.train.runs import (
    STEPS,
    assert_bitwise_equal,
    descendants,
    is_alive,
    metrics,
    num_steps,
    train,
    wait_until,
)

pytestmark = pytest.mark.slow

WAIT_S = 240.0
"""A loaded machine takes its time; who waits for a lost rank waits for train.timeout_s = 600."""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return [*STEPS, *small_corpus(tmp_path_factory.mktemp("corpus")), "mesh.tp=2", "mesh.dp_shard=2"]


def start_nodes(words, out, *more, ranks_each=2):
    """The two agents. They meet at a file: a free port that a test finds may be taken when they want it."""
    meeting = out.with_name(f"{out.name}-meeting")
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks_each),
             "--rdzv-backend", "c10d", "--rdzv-endpoint", str(meeting), "--rdzv-conf", "store_type=file",
             "--rdzv-id", "test", "--local-addr", "127.0.0.1", "-m", "meshwright", "run", *words, "--out", str(out),
             *more],
            env=clean_environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip


def ranks_of(node):
    """The processes of an agent that run our command."""
    lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(node.pid)}
    return [pid for pid, line in lines.items() if is_alive(pid) and b"meshwright\0run" in line.read_bytes()]


def finish(nodes, *, timeout_s=WAIT_S):
    outputs = [node.communicate(timeout=timeout_s) for node in nodes]
    return [node.returncode for node in nodes], outputs


def test_two_nodes_train_as_four_local_processes(words, tmp_path):
    (tmp_path / "local").mkdir()
    train(words, tmp_path / "local")
    codes, outputs = finish(start_nodes(words, tmp_path / "nodes"))
    assert codes == [0, 0], outputs
    assert_bitwise_equal(tmp_path / "nodes", tmp_path / "local")
    shown = outputs[0][0] + outputs[1][0]
    assert shown.count("mesh dp_shard 2 × tp 2 = 4 processes (cpu, gloo)") == 1  # one rank speaks


def test_a_rank_killed_on_one_node_ends_both(words, tmp_path):
    nodes = start_nodes([*words, "mesh.dp_shard=1", "train.steps=100000", "checkpoint.every=2"], tmp_path, ranks_each=1)
    wait_until(lambda: num_steps(tmp_path) >= 3, timeout_s=WAIT_S)
    ranks = [pid for node in nodes for pid in ranks_of(node)]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)), timeout_s=WAIT_S)
    codes, outputs = finish(nodes)
    assert all(code != 0 for code in codes)
    errors = outputs[0][1] + outputs[1][1]
    assert re.search(r"rank \d lost another rank in (step \d+|saving|validating)", errors), errors
    assert "SIGKILL" in errors or "exitcode  : -9" in errors  # torchrun names the one that was killed
    # And on one node, on another layout, it goes on from there.
    step = int(list_checkpoints(tmp_path / "checkpoints")[-1].name)
    train([*words, "mesh.tp=1", "mesh.dp_shard=1", f"train.steps={step + 2}"], tmp_path, resume="auto")
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, step + 3))


def test_bad_input_under_torchrun_is_said_and_ends_it(words, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    codes, outputs = finish(start_nodes([*words, "mesh.dp_shard=1"], tmp_path, ranks_each=1))
    assert all(code != 0 for code in codes)
    errors = outputs[0][1] + outputs[1][1]
    assert "already holds a run" in errors and errors.count("--resume auto to continue it") == 1
