"""Scripts of `meshwright launch`, run on this machine: two nodes on loopback, stopped by the scheduler and resumed.

Ranks train where a signal must reach them, and are stand-ins elsewhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import pytest
import yaml

from tests.cli.cluster_stand_ins import LOWEST_PORT, Cluster, HeldUntilSignalled, free_port
from tests.helpers import SMALL, small_corpus
from tests.train.runs import metrics, wait_until

STEPS = ["train.steps=6", "checkpoint.every=0", *SMALL, "train.validation_samples=0", "train.sample_tokens=0"]
SIZE = ["--nodes", 2, "--gpus-per-node", 2]
ONE_GPU_EACH = ["--nodes", 2, "--gpus-per-node", 1]
"""Enough where ranks train."""
POD = ["--image", "i", "--volume", "v"]
WAIT_S = 240.0
"""A loaded machine takes its time; who waits for a lost rank waits for train.timeout_s = 600."""

TELLS = """#!/bin/bash
echo "$SLURM_PROCID of $SLURM_NTASKS at $MASTER_ADDR:$MASTER_PORT"
exit {code}
"""
POD_RANK = """#!/bin/bash
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE: $*"
{body}
"""


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path / "bin")


@pytest.fixture
def script(here, tmp_path):
    """Writes an sbatch script, and gives its path."""

    def write(*words, size=SIZE):
        done = here("launch", "slurm", "llama-tiny", *words, *size, "--name", "a", "-o", tmp_path / "job.sbatch")
        assert done.returncode == 0, done.stderr
        return tmp_path / "job.sbatch"

    return write


@pytest.fixture
def manifest(here):
    """Writes a JobSet, and gives what a parser reads."""

    def write(*words, size=SIZE):
        done = here("launch", "kubernetes", "llama-tiny", *words, *size, *POD, "--name", "a")
        assert done.returncode == 0, done.stderr
        return yaml.safe_load(done.stdout)

    return write


def finish(*processes):
    """The exit codes and outputs of processes; nothing of their groups stays."""
    try:
        outputs = ["".join(process.communicate(timeout=WAIT_S)) for process in processes]
        return [process.returncode for process in processes], outputs
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("code", "num_requeued"), [(0, 0), (1, 0), (2, 0), (3, 1), (130, 0)])
def test_only_a_stopped_run_is_queued_again(cluster, script, code, num_requeued):
    cluster.command("meshwright", TELLS.format(code=code))
    [ended], [output] = finish(cluster.sbatch(script("mesh.dp_shard=4"), job_id=1_234_567))
    assert ended == code and cluster.num_requeued() == num_requeued, output
    assert sorted(output.split("\n")[:-1]) == [f"{rank} of 4 at localhost:24567" for rank in range(4)]
    assert cluster.srun_words()[:4] == ["--label", "--wait=60", "meshwright", "run"]


def test_a_port_can_be_chosen(cluster, script):
    cluster.command("meshwright", TELLS.format(code=0))
    _, [output] = finish(cluster.sbatch(script("mesh.dp_shard=4"), job_id=5, MASTER_PORT="4321"))
    assert "at localhost:4321\n" in output


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_starts_its_ranks(cluster, manifest, tmp_path, index):
    cluster.command("meshwright", POD_RANK.format(body="exit 0"))
    [code], [output] = finish(cluster.pod(manifest("mesh.dp_shard=4", "name=a $b"), index, tmp_path))
    assert code == 0
    words = "run llama-tiny mesh.dp_shard=4 name=a $b --out runs/a --resume auto"
    assert sorted(output.splitlines()) == [f"{2 * index + gpu} of 4, {gpu} of 2: {words}" for gpu in range(2)]


@pytest.mark.parametrize("code", [1, 2, 3])
def test_a_pod_ends_with_its_first_rank_that_fails(cluster, manifest, tmp_path, code):
    """The other waits for it in a collective, and ignores SIGTERM there. Its output ends only with itself."""
    body = f"if [ $RANK = 1 ]; then exit {code}; fi; trap '' TERM; while :; do sleep 0.1; done"
    cluster.command("meshwright", POD_RANK.format(body=body))
    cluster.command("sleep", "#!/bin/bash\nexec /bin/sleep 0.1\n")  # not the seconds that the other may report in
    [ended], _ = finish(cluster.pod(manifest("mesh.dp_shard=4"), 0, tmp_path))
    assert ended == code


@pytest.mark.slow
def test_a_pod_passes_sigterm_on_and_waits_for_its_ranks(cluster, manifest, tmp_path):
    """Kubernetes sends it to the first process only. Others have the seconds that they need to report."""
    body = (
        "trap 'echo saved $RANK; touch saved-$RANK; exit 3' TERM; touch ready-$RANK; while :; do /bin/sleep 0.1; done"
    )
    cluster.command("meshwright", POD_RANK.format(body=body))
    needed = '[ "$1" = 5 ] && until [ -e saved-0 ] && [ -e saved-1 ]; do /bin/sleep 0.1; done'
    cluster.command("sleep", f"#!/bin/bash\n{needed}\nexec /bin/sleep 0.1\n")
    pod = cluster.pod(manifest("mesh.dp_shard=4"), 0, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    pod.send_signal(signal.SIGTERM)
    [code], [output] = finish(pod)
    assert code == 3 and "saved 0" in output and "saved 1" in output


@pytest.mark.slow
def test_a_job_of_slurm_is_stopped_and_requeued_and_pods_go_on(cluster, script, manifest, tmp_path):
    """SLURM sends SIGTERM to all ranks, and a node that is drained to its pod only: all ranks save."""
    words = [*STEPS, *small_corpus(tmp_path / "my corpus"), "mesh.dp_shard=2"]
    path = script(*words, size=ONE_GPU_EACH)
    hold = HeldUntilSignalled(tmp_path / "hold", rank=1, step=2)
    job = cluster.sbatch(path, job_id=free_port() - LOWEST_PORT, **hold.environment())
    try:
        hold.wait()
        cluster.signal_tasks(path.read_text())
    finally:
        [code], [output] = finish(job)
    assert code == 3 and "stopped after step 2, as requested; saved runs/a/checkpoints/00000002" in output, output
    assert cluster.num_requeued() == 1 and cluster.srun_words()[-4:] == ["--out", "runs/a", "--resume", "auto"]

    hold = HeldUntilSignalled(tmp_path / "second hold", rank=1, step=4)
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), **hold.environment()}
    jobset = manifest(*words, size=ONE_GPU_EACH)
    pods = [cluster.pod(jobset, index, tmp_path, **environment) for index in range(2)]
    try:
        hold.wait()
        pods[1].send_signal(signal.SIGTERM)
    finally:
        codes, outputs = finish(*pods)
    assert codes == [3, 3] and "resuming from runs/a/checkpoints/00000002" in outputs[0], outputs
    assert "stopped after step 4, as requested" in outputs[0], outputs
    assert "saved runs/a/checkpoints/00000004" in outputs[0] + outputs[1], outputs
    assert [line["step"] for line in metrics(tmp_path / "runs/a")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_invalid_input_is_not_queued_again(cluster, script, tmp_path):
    path = script(*STEPS, "mesh.dp_shard=2", "data.source=no/*.txt", size=ONE_GPU_EACH)
    [code], [output] = finish(cluster.sbatch(path, job_id=free_port() - LOWEST_PORT))
    assert code == 2 and cluster.num_requeued() == 0 and "no/*.txt" in output, output


RANK_WRITES = """
import os, sys
from pathlib import Path

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
Path("rank-" + os.environ["RANK"]).write_text(" ".join([*(os.environ[name] for name in names), *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_torchrun_lines_start_the_ranks(here, cluster, tmp_path):
    """In place of the command, each writes what it was started with. Such ranks train in tests/train/test_nodes.py."""
    package = tmp_path / "stand-in/meshwright"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(RANK_WRITES)
    words = ["llama-tiny", "data.source=my corpus/*.txt", "mesh.dp_shard=2"]
    done = here("launch", "torchrun", *words, "--nodes", 2, "--gpus-per-node", 1)
    text = done.stdout.replace("--master-port 29500", f"--master-port {free_port()}")
    nodes = [
        subprocess.Popen(
            ["bash", "-c", line], env=cluster.environment(HEAD_NODE="localhost", PYTHONPATH=package.parent),
            cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )
        for line in text.splitlines()[2::2]
    ]  # fmt: skip
    codes, outputs = finish(*nodes)
    assert codes == [0, 0], outputs
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert told == [f"{rank} 2 0 1 run {' '.join(words)} --out runs/llama-tiny --resume auto" for rank in range(2)]
