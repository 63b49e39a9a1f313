"""Stand-ins for a cluster on this machine: SLURM's commands as it is documented to call them, and a pod's container."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import clean_environment
from tests.train.runs import wait_until

LOWEST_PORT, NUM_PORTS = 20_000, 10_000
"""Ports of the sbatch script, below those that Linux hands out by itself, so that a free one stays free."""

SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") [ "$3" = "$SLURM_JOB_NODELIST" ] && printf 'localhost\\nlocalhost-2\\n' ;;
    "requeue $SLURM_JOB_ID") echo requeued >>{folder}/requeued ;;
    *) exit 9 ;;
esac
"""

SRUN = """#!{python}
import json, os, subprocess, sys
from pathlib import Path

folder, words = Path({folder!r}), sys.argv[1:]
(folder / "srun.json").write_text(json.dumps(words))
while words[0].startswith("--"):
    assert words.pop(0) in ("--label", "--wait=60")
each = int(os.environ["SLURM_NTASKS_PER_NODE"])
num_tasks = int(os.environ["SLURM_NNODES"]) * each
tasks = []
for task in range(num_tasks):
    facts = dict(PROCID=task, LOCALID=task % each, NODEID=task // each, NTASKS=num_tasks)
    variables = {{f"SLURM_{{name}}": str(value) for name, value in facts.items()}}
    tasks.append(subprocess.Popen(words, env=os.environ | variables))
(folder / "tasks.new").write_text(json.dumps([task.pid for task in tasks]))
(folder / "tasks.new").rename(folder / "tasks.json")
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

MESHWRIGHT = """#!/bin/bash
exec {python} -m meshwright "$@"
"""


HOLDING = """
import time
from pathlib import Path
from meshwright.train.launch.rank_context import StatusBoard, StopSignal

post, hear, heard = StatusBoard.post, StopSignal._hear, []

def holding(board, *facts):
    post(board, *facts)
    if facts == {facts!r}:
        Path({folder!r}, "held").touch()
        while not heard:
            time.sleep(0.01)

def hearing(stop, *facts):
    hear(stop, *facts)
    heard.append(facts)

StatusBoard.post, StopSignal._hear = holding, hearing
"""


@dataclass(frozen=True)
class HeldUntilSignalled:
    """Keeps a rank in a step until it hears SIGTERM, so that the run stops after this step, however slow anything is.

    By a `sitecustomize` that the command's processes import: nothing of the run knows of it.
    """

    folder: Path
    rank: int
    step: int

    def environment(self) -> dict[str, str]:
        """Environment of the ranks."""
        self.folder.mkdir()
        text = HOLDING.format(facts=(self.rank, "step", self.step), folder=str(self.folder))
        (self.folder / "sitecustomize.py").write_text(text)
        return {"PYTHONPATH": os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH", ""))))}

    def wait(self) -> None:
        """Until the rank is there."""
        wait_until((self.folder / "held").exists, timeout_s=240)


class Cluster:
    """A folder of commands that come first in the PATH, and what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.command("scontrol", SCONTROL.format(folder=folder))
        self.command("srun", SRUN.format(python=sys.executable, folder=str(folder)))
        self.command("meshwright", MESHWRIGHT.format(python=sys.executable))

    def command(self, name: str, text: str) -> None:
        """Add a command, or replace it."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def environment(self, **changes: object) -> dict[str, str]:
        """Environment of a process on the cluster."""
        path = os.pathsep.join([str(self.folder), str(Path(sys.executable).parent), os.environ["PATH"]])
        values = {name: str(value) for name, value in changes.items()}
        return clean_environment(**{"PATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **values})

    def sbatch(self, script: Path, *, job_id: int, **changes: str) -> subprocess.Popen[str]:
        """Run a script with the variables that SLURM sets according to its directives."""
        options = directives(script.read_text())
        return subprocess.Popen(
            ["bash", str(script)],
            env=self.environment(
                SLURM_JOB_ID=job_id, SLURM_JOB_NODELIST="node[1-2]", SLURM_NNODES=options["nodes"],
                SLURM_NTASKS_PER_NODE=options["ntasks-per-node"], **changes,
            ),
            cwd=script.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def srun_words(self) -> list[str]:
        """Arguments of srun."""
        return json.loads((self.folder / "srun.json").read_text())

    def signal_tasks(self, script: str) -> None:
        """Send the signal that the script asks for, to the tasks and not to the script: `--signal` without `B:`."""
        name = re.fullmatch(r"([A-Z]+\d?)@\d+", directives(script)["signal"])
        assert name is not None
        for pid in json.loads((self.folder / "tasks.json").read_text()):
            os.kill(pid, signal.Signals[f"SIG{name[1]}"])

    def num_requeued(self) -> int:
        """How often the job was requeued."""
        path = self.folder / "requeued"
        return len(path.read_text().split()) if path.exists() else 0

    def pod(self, manifest: dict, index: int, folder: Path, **changes: object) -> subprocess.Popen[str]:
        """Run the container of a JobSet's pod, in `folder` instead of its working directory."""
        job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        [container] = job["template"]["spec"]["containers"]
        variables = {one["name"]: one["value"] for one in container["env"]}
        words = [expand(word, variables) for word in [*container["command"], *container["args"]]]
        return subprocess.Popen(
            words, env=self.environment(**variables | {"JOB_COMPLETION_INDEX": index, **changes}),
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip


def directives(script: str) -> dict[str, str]:
    """The options in a script's `#SBATCH` lines, of which sbatch reads those before the first command."""
    found = {}
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH "):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            assert name not in found, line
            found[name] = value
        elif line and not line.startswith("#"):
            break
    assert script.count("#SBATCH") == len(found)
    return found


def expand(word: str, variables: dict[str, str]) -> str:
    """A word of a command as Kubernetes passes it on: $(NAME) is a variable's value if there is one, $$ is $."""
    return re.sub(
        r"\$(?:\$|\(([^)]*)\))",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        word,
    )


def free_port() -> int:
    """A port of the script's range that nothing listens on."""
    while True:
        port = LOWEST_PORT + random.SystemRandom().randrange(NUM_PORTS)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
