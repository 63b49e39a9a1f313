"""Two nodes on one machine: two torchrun agents with two ranks each, through the public command."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from meshwright.checkpoint.manifest import list_checkpoints
from tests.helpers import clean_environment, small_corpus
from tests.train.runs import (
    LIMIT_S,
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


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return [*STEPS, *small_corpus(tmp_path_factory.mktemp("corpus")), "mesh.tp=2", "mesh.dp_shard=2"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_nodes(words, out, *more, ranks_each=2):
    """The two agents; the first ranks are on the first node."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks_each),
             "--node-rank", str(node), "--rdzv-backend", "static", "--master-addr", "127.0.0.1",
             "--master-port", str(port), "-m", "meshwright", "run", *words, "--out", str(out), *more],
            env=clean_environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip


def finish(nodes, *, timeout_s=180):
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
    nodes = start_nodes([*words, "train.steps=100000", "checkpoint.every=2"], tmp_path)
    wait_until(lambda: num_steps(tmp_path) >= 3, timeout_s=120)
    ranks = [pid for node in nodes for pid in descendants(node.pid)]
    second = descendants(nodes[1].pid)
    os.kill(second[0], signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: not any(map(is_alive, ranks)), timeout_s=40)
    took_s = time.monotonic() - killed
    codes, outputs = finish(nodes)
    assert all(code != 0 for code in codes)
    errors = outputs[0][1] + outputs[1][1]
    assert re.search(r"rank \d lost another rank in (step \d+|saving|validating)", errors), errors
    assert "SIGKILL" in errors or "exitcode  : -9" in errors  # torchrun names the one that was killed
    assert took_s < LIMIT_S, f"{took_s:.1f} s"
    # And on one node, on another layout, it goes on from there.
    step = int(list_checkpoints(tmp_path / "checkpoints")[-1].name)
    train([*words, "mesh.tp=1", "mesh.dp_shard=1", f"train.steps={step + 2}"], tmp_path, resume="auto")
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, step + 3))


def test_bad_input_under_torchrun_is_said_and_ends_it(words, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    codes, outputs = finish(start_nodes([*words, "mesh.dp_shard=1"], tmp_path, ranks_each=1))
    assert all(code != 0 for code in codes)
    errors = outputs[0][1] + outputs[1][1]
    assert "already holds a run" in errors and errors.count("--resume auto to go on with it") == 1
