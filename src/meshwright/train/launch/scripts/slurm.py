"""sbatch scripts: one task per GPU, stopped with a checkpoint before the time limit, and queued again after that."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from meshwright.train.launch.scripts.cluster_job import SAVING_S, STOPPED, ClusterJob, check_text

BODY = """\
export MASTER_ADDR MASTER_PORT
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}}

# One task per GPU. Tasks still running 60 s after the first has ended wait for
# ranks that are gone, and are killed.
srun --label --wait=60 meshwright {arguments}
status=$?

# {stopped}: stopped as requested, by the time limit or a preemption, with a checkpoint.
# Errors are not retried.
if [ "$status" -eq {stopped} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True)
class SlurmOptions:
    """Requests to SLURM besides nodes; None leaves one to the cluster's default."""

    time: str | None = None
    partition: str | None = None
    account: str | None = None

    def check(self) -> None:
        """Check that each value is one word that SLURM accepts.

        Raises:
            InputError: a value is not.
        """
        if self.time is not None:
            rule = "a time limit is minutes, hours:minutes:seconds, or days-hours:minutes:seconds"
            pattern = r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}"
            check_text(self.time, pattern, option="--time", rule=rule, fix="1-00:00:00")
        rule = "a name of SLURM's is one word"
        for option, text in (("--partition", self.partition), ("--account", self.account)):
            if text is not None:
                check_text(text, r"\w[\w.,:@/+-]*", option=option, rule=rule, fix="gpu")


def sbatch_script(job: ClusterJob, options: SlurmOptions) -> str:
    """Return the sbatch script of a job, which expects `meshwright` in the PATH of the submitting shell.

    SLURM sends SIGTERM to the tasks before the time limit (`--signal`, without `B:`) and when it preempts the job; the
    ranks then save and exit with a code of their own. The script therefore needs no signal handler.

    Raises:
        InputError: an option has a value that SLURM does not accept.
    """
    options.check()
    directives = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.gpus_per_node,
        "gpus-per-node": job.gpus_per_node,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": "%x-%j.out",
        "open-mode": "append",
        "requeue": "",
        "signal": f"TERM@{SAVING_S}",
    }
    lines = [
        f"#SBATCH --{name}" + (f"={value}" if value != "" else "")
        for name, value in directives.items()
        if value is not None
    ]
    head = ["#!/bin/bash", f"# {job.summary()}", *lines, ""]
    return "\n".join(head) + "\n" + BODY.format(arguments=shlex.join(job.arguments()), stopped=STOPPED)
