"""A run as a job of a cluster, checked before anything is written, its sbatch script and its torchrun command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.rules import repair
from meshwright.config.schema import RunConfig
from meshwright.config.source import is_run_folder
from meshwright.errors import InputError, LayoutError
from meshwright.plan.rules import violations
from meshwright.settings.violation import format_fix
from meshwright.units import counted

SAVING_S = 120
"""Time from the signal that stops a run to its end, in which it completes its step and saves a checkpoint."""
INVALID, STOPPED = 2, 3
"""Exit codes of a run that is not to be started again, and of one that is."""
PORT = 29500
"""Rendezvous port on nodes that no other job uses."""

AXES = ("dp_shard", "dp_replicate", "pp", "tp", "cp")
"""Axes in the order in which a fix changes them: data parallelism first, since it keeps the model's layout."""
MAX_FIXES = 2


@dataclass(frozen=True)
class ClusterJob:
    """A run on `nodes` nodes with one rank per GPU."""

    name: str
    """Name of the job, and of the run folder below `runs/`."""
    mesh: str
    """Sizes of the mesh axes, for the header of the script."""
    nodes: int
    gpus_per_node: int
    words: tuple[str, ...]
    """Arguments of `meshwright run`: a preset or a file, and overrides."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node

    def arguments(self) -> list[str]:
        """Return the arguments of `meshwright`, which start the run or continue it from its newest checkpoint."""
        if any(is_run_folder(Path(word)) for word in self.words[:1]):
            return ["run", *self.words]  # it continues in its own folder
        return ["run", *self.words, "--out", f"runs/{self.name}", "--resume", "auto"]

    def summary(self) -> str:
        """Describe the job in one line: `llama-tiny: 2 nodes × 2 GPUs = 4 ranks (dp_shard 4)`."""
        sizes = f"{counted(self.nodes, 'node')} × {counted(self.gpus_per_node, 'GPU')}"
        return f"{self.name}: {sizes} = {counted(self.num_ranks, 'rank')}" + f" ({self.mesh})" * (self.num_ranks > 1)


def make_job(
    config: RunConfig, words: Sequence[str], *, nodes: int, gpus_per_node: int, name: str | None = None
) -> ClusterJob:
    """Return the job that runs `words`, which were loaded as `config`; its name is by default the configuration's.

    Raises:
        LayoutError: the mesh does not have `nodes` × `gpus_per_node` ranks.
        InputError: the name can't be that of a folder and a job.
    """
    _check_ranks(config, nodes, gpus_per_node)
    job_name = config.name if name is None else name
    check_text(job_name, r"\w[\w.-]*", option="--name", rule="a name has letters, digits, _, . and -", fix="run-1")
    return ClusterJob(job_name, str(config.mesh.axes()), nodes, gpus_per_node, tuple(words))


def check_text(text: str, pattern: str, *, option: str, rule: str, fix: str) -> None:
    """Check that all of `text`, given to an option, matches a pattern, since it is written into a script.

    Raises:
        InputError: it does not; the message has the rule, and `fix` as a value that does.
    """
    if not re.fullmatch(pattern, text, re.ASCII):
        raise InputError(f"{option} {text!r} is not allowed", where=f"command line, {option}", rule=rule,
                         fix=f"{option} {fix}")  # fmt: skip


def _check_ranks(config: RunConfig, nodes: int, gpus_per_node: int) -> None:
    axes, wanted = config.mesh.axes(), nodes * gpus_per_node
    if axes.num_ranks() == wanted:
        return
    found = f"{axes.num_ranks()} ({axes})" if axes.num_ranks() > 1 else str(axes)
    fixes = [format_fix(fix) for fix in _fixes(config, wanted)]
    if axes.num_ranks() % gpus_per_node == 0:
        fixes.append(f"--nodes {axes.num_ranks() // gpus_per_node}")
    raise LayoutError(
        f"{nodes} × {gpus_per_node} GPUs are {counted(wanted, 'rank')}, but the mesh has {found}",
        where="command line, --nodes and --gpus-per-node",
        rule="the product of the mesh axes is the number of nodes times the GPUs per node: one rank per GPU",
        fix=" or ".join(fixes) or f"a mesh of {counted(wanted, 'rank')}",
    )


def _fixes(config: RunConfig, num_ranks: int) -> list[Mapping[str, Any]]:
    """Return up to `MAX_FIXES` ways to get `num_ranks` ranks by another size of one axis, with what else that needs.

    Those that need nothing else come first. If there is no such way, all ranks go to the first axis.
    """
    axes = config.mesh.axes()
    sizes = {axis: num_ranks * getattr(axes, axis) / axes.num_ranks() for axis in AXES}
    single = [{f"mesh.{axis}": int(size)} for axis, size in sizes.items() if size.is_integer()]
    flat = {f"mesh.{axis}": 1 for axis in AXES if getattr(axes, axis) > 1} | {f"mesh.{AXES[0]}": num_ranks}
    found = [fix for fix in (_completed(config, fix, num_ranks) for fix in single) if fix]
    return sorted(found, key=len)[:MAX_FIXES] or [fix for fix in [_completed(config, flat, num_ranks)] if fix]


def _completed(config: RunConfig, fix: Mapping[str, Any], num_ranks: int) -> Mapping[str, Any]:
    """Return `fix` with what else it needs for a valid run of `num_ranks` ranks, or nothing if that is not found."""
    more = repair(config.with_keys(fix), None, violations)
    complete = {**fix, **(more or {})}
    changed = config.with_keys(complete)
    valid = changed.mesh.axes().num_ranks() == num_ranks and next(violations(changed, None), None) is None
    return complete if valid else {}


HEAD_NODE = "$HEAD_NODE"
"""Placeholder of the host of node 0: a variable, to be set in the shell of each node."""


def torchrun_lines(job: ClusterJob, *, host: str = HEAD_NODE) -> str:
    """Return the command line of each node, below a comment with its number.

    `host` is node 0's, as a name, an address or a shell variable.

    Raises:
        InputError: the host is none of these.
    """
    rule = "the host of node 0 is a name, an address, or a shell variable such as $HEAD_NODE"
    check_text(host, r"\$[A-Za-z_]\w*|[A-Za-z0-9][\w.-]*|[0-9A-Fa-f:]+", option="--host", rule=rule, fix="node1")
    processes = f"--nproc-per-node {job.gpus_per_node}"
    command = f"-m meshwright {shlex.join(job.arguments())}"
    lines = [f"# {job.summary()}"]
    if job.nodes == 1:
        return "\n".join([*lines, f"torchrun --standalone {processes} {command}", ""])
    # An unset variable is an error of the shell, with its name.
    address = f'"${{{host[1:]}:?}}"' if host.startswith("$") else host
    for node in range(job.nodes):
        rendezvous = f"--nnodes {job.nodes} --node-rank {node} --master-addr {address} --master-port {PORT}"
        lines += [f"# node {node}", f"torchrun {rendezvous} {processes} {command}"]
    return "\n".join([*lines, ""])


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
