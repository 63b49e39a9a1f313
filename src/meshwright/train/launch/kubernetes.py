"""Kubernetes manifests: a JobSet of one pod per node, restarted from the newest checkpoint when a pod is lost.

JobSet (jobset.sigs.k8s.io) restarts all pods together, which a job of collectives needs; a Job by itself would replace
the lost pod only, and the others would wait for ranks that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.train.launch.cluster_job import INVALID, PORT, SAVING_S, ClusterJob, check_text

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
    invalid = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "ranks", "operator": "In", "values": [INVALID]},
    }
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
