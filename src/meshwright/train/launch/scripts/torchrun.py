"""torchrun's command lines: one for each node."""

from __future__ import annotations

import shlex

from meshwright.train.launch.scripts.cluster_job import PORT, ClusterJob, check_text

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
