"""A run as a job of a cluster, checked before anything is written, as an sbatch script, a JobSet or torchrun's lines.

JobSet (jobset.sigs.k8s.io) restarts all pods together, which a job of collectives needs; a Kubernetes Job by
itself would replace the lost pod only, and the others would wait for ranks that are gone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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


MAX_RESTARTS = 10
WORK = "/training"
"""Mount point of the volume: the working directory, with corpora and runs."""
CONFIG = "/etc/meshwright"
"""Mount point of the configuration file, if the run has one."""
MAX_LABEL = 63

# One process per GPU, without torchrun, which would exit with 1 whatever a rank's code is, and kill ranks 30 s after a
# signal. The pod ends with its first rank that fails: the others may be waiting for it, for up to train.timeout_s.
# Ranks are polled, since `wait -n` misses one that ends at the same time as another.
START_RANKS = """\
ranks=()
trap 'kill -TERM "${ranks[@]}" 2>/dev/null' TERM
trap 'kill -KILL "${ranks[@]}" 2>/dev/null' EXIT
for ((gpu = 0; gpu < LOCAL_WORLD_SIZE; gpu++)); do
  RANK=$((JOB_COMPLETION_INDEX * LOCAL_WORLD_SIZE + gpu)) LOCAL_RANK=$gpu meshwright "$@" &
  ranks[gpu]=$!
done
while ((${#ranks[@]})); do
  sleep 1
  for gpu in "${!ranks[@]}"; do
    if kill -0 "${ranks[gpu]}" 2>/dev/null; then continue; fi
    wait "${ranks[gpu]}"
    status=$?
    unset "ranks[gpu]"
    if ((status)); then
      sleep 5  # time for the other ranks to say what they know; then they are killed
      exit $status
    fi
  done
done
"""


@dataclass(frozen=True)
class KubernetesOptions:
    """Container image and volume of the pods, and the configuration file that they get."""

    image: str
    volume: str
    """Persistent volume claim, which all pods can write to."""
    file: Path | None = None
    """The configuration file, if the run's first word is one; the manifest contains it."""

    def check(self, job: ClusterJob) -> None:
        """Check names against Kubernetes' rules.

        Raises:
            InputError: a name or the image is invalid, or the names of pods would be too long.
        """
        rule = "a Kubernetes name has lower-case letters, digits and -, and begins with a letter (RFC 1035)"
        check_text(job.name, r"[a-z]([a-z0-9-]*[a-z0-9])?", option="--name", rule=rule, fix="run-1")
        # JobSet checks the longest pod name, to which Kubernetes appends five random characters.
        room = MAX_LABEL - len(f"-node-0-{job.nodes - 1}-abcde")
        rule = f"the names of pods, such as NAME-node-0-{job.nodes - 1}-abcde, have at most {MAX_LABEL} characters"
        check_text(job.name, rf".{{1,{room}}}", option="--name", rule=rule, fix=job.name[:room].rstrip("-"))
        rule = "an image is [REGISTRY/]NAME[:TAG][@DIGEST], without spaces"
        check_text(self.image, r"[a-z0-9][\w.:/@-]*", option="--image", rule=rule, fix="registry/meshwright:0.1.0")
        rule = "the name of a claim has lower-case letters, digits, - and . (RFC 1123)"
        name = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
        check_text(self.volume, rf"{name}(\.{name})*", option="--volume", rule=rule, fix="runs")
        if self.file is not None:
            rule = "the name of a file in a ConfigMap has letters, digits, ., _ and -"
            check_text(self.file.name, r"[\w.-]+", option="FILE", rule=rule, fix="run.toml")


def jobset_manifest(job: ClusterJob, options: KubernetesOptions) -> str:
    """Return the JobSet of a job as YAML, behind a ConfigMap with the configuration file if there is one.

    Raises:
        InputError: a name is not valid in Kubernetes.
    """
    options.check(job)
    documents = [jobset(job, options)]
    if options.file is not None:
        data = {options.file.name: options.file.read_text("utf-8-sig")}
        head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}}
        documents.insert(0, {**head, "data": data})
    return f"# {job.summary()}\n" + to_yaml(documents)


def jobset(job: ClusterJob, options: KubernetesOptions) -> dict[str, Any]:
    """Return the fields of the JobSet."""
    invalid = {"action": "FailJob", "onExitCodes": {"containerName": "ranks", "operator": "In", "values": [INVALID]}}
    batch_job = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [invalid]},
        "template": {"spec": _pod(job, options)},
    }
    # Without this rule JobSet would restart a Job that its podFailurePolicy has failed for good.
    rule = {"name": "invalidInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": [rule]},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": batch_job}}],
        },
    }


def _pod(job: ClusterJob, options: KubernetesOptions) -> dict[str, Any]:
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "work": (WORK, {"persistentVolumeClaim": {"claimName": options.volume}}),
        # NCCL's and the data loader's shared memory; a container has 64 MiB without it.
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),
    }
    words = job.arguments()
    if options.file is not None:
        volumes["config"] = (CONFIG, {"configMap": {"name": job.name}})
        words[1] = f"{CONFIG}/{options.file.name}"
    environment = {
        "MASTER_ADDR": f"{job.name}-node-0-0.{job.name}",
        "MASTER_PORT": PORT,
        "WORLD_SIZE": job.num_ranks,
        "LOCAL_WORLD_SIZE": job.gpus_per_node,
    }
    container = {
        "name": "ranks",
        "image": options.image,
        "workingDir": WORK,
        "command": ["bash", "-c", START_RANKS, "ranks"],
        # Kubernetes replaces $(NAME) in arguments, and reads $$ as $.
        "args": [word.replace("$", "$$") for word in words],
        "env": [{"name": name, "value": str(value)} for name, value in environment.items()],
        "resources": {"limits": {"nvidia.com/gpu": job.gpus_per_node}},
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVING_S,
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Dumper that writes strings of several lines as literal blocks, and every value where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return mappings of plain values as YAML documents."""
    text: str = yaml.dump_all(map(dict, documents), Dumper=_Dumper, sort_keys=False, width=1000)
    return text
