"""`meshwright launch`: write the script that starts a run on a cluster. Nothing is submitted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.config_arguments import Words, split_words
from meshwright.cli.usage_errors import Commands, ConfigCommand
from meshwright.cli.wrapping import show
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.train.launch.cluster_job import ClusterJob

OUT_OPTION = "command line, -o"

app = typer.Typer(cls=Commands)

Nodes = Annotated[int, typer.Option(min=1, help="Number of nodes, such as 2.")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs per node, such as 8; one rank per GPU.")]
Name = Annotated[str | None, typer.Option(help="Name of the job and of its folder in runs/; default: the run's name.")]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="The file to write; default: stdout.")]


@app.command(cls=ConfigCommand)
def slurm(
    words: Words = None,
    *,
    nodes: Nodes,
    gpus_per_node: Gpus,
    name: Name = None,
    out: Out = None,
    time: Annotated[str | None, typer.Option(help="Time limit in sbatch's format, such as 1-00:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition; default: the cluster's.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge; default: the user's.")] = None,
) -> None:
    """Write an sbatch script, which queues the run again after a stop by the time limit or a preemption."""
    from meshwright.train.launch.cluster_job import SlurmOptions, sbatch_script

    job, memory = _job(words, nodes, gpus_per_node, name, out)
    options = SlurmOptions(time=time, partition=partition, account=account)
    _write(sbatch_script(job, options), out, job, memory, "sbatch")


@app.command(cls=ConfigCommand)
def kubernetes(
    words: Words = None,
    *,
    nodes: Nodes,
    gpus_per_node: Gpus,
    image: Annotated[str, typer.Option(help="Container image with meshwright, such as the Dockerfile's.")],
    volume: Annotated[str, typer.Option(metavar="CLAIM", help="Persistent volume claim for corpora and runs.")],
    name: Name = None,
    out: Out = None,
) -> None:
    """Write a JobSet, which restarts the run from its newest checkpoint when a pod fails or is evicted."""
    from meshwright.config.source import preset_names
    from meshwright.train.launch.cluster_job import KubernetesOptions, jobset_manifest

    source = split_words(words)[0]
    file = None if source is None or source in preset_names() else Path(source)
    job, memory = _job(words, nodes, gpus_per_node, name, out)
    _write(jobset_manifest(job, KubernetesOptions(image, volume, file)), out, job, memory, "kubectl apply -f")


@app.command(cls=ConfigCommand)
def torchrun(
    words: Words = None,
    *,
    nodes: Nodes,
    gpus_per_node: Gpus,
    name: Name = None,
    out: Out = None,
    host: Annotated[str, typer.Option(help="Host of node 0: a name, an address, or a shell variable.")] = "$HEAD_NODE",
) -> None:
    """Write a torchrun command line for each node."""
    from meshwright.train.launch.cluster_job import torchrun_lines

    job, memory = _job(words, nodes, gpus_per_node, name, out)
    _write(torchrun_lines(job, host=host), out, job, memory, None)


def _job(
    words: list[str] | None, nodes: int, gpus_per_node: int, name: str | None, out: Path | None
) -> tuple[ClusterJob, str]:
    """Load and verify the run, as on that cluster, and return its job, and the memory of a rank in words."""
    from meshwright.cli.plan_page import devices
    from meshwright.output_files import check_output
    from meshwright.plan.cuda_memory import predict_cuda_memory
    from meshwright.plan.make_plan import make_plan
    from meshwright.plan.rules import load
    from meshwright.plan.verify import verify
    from meshwright.train.launch.cluster_job import make_job

    if out is not None:
        check_output(out, where=OUT_OPTION)
    config = load(*split_words(words))
    job = make_job(config, words or [], nodes=nodes, gpus_per_node=gpus_per_node, name=name)
    plan = make_plan(config, nodes=gpus_per_node)
    verify(plan, where=config.name)
    memory = predict_cuda_memory(plan).total()
    return job, f"maximum memory of a rank  {format_bytes(memory)}\n{devices(memory)}"


def _write(text: str, out: Path | None, job: ClusterJob, memory: str, command: str | None) -> None:
    from meshwright.output_files import write_output

    if out is None:
        print(text, end="")
        return
    write_output(out, text, where=OUT_OPTION)
    show(f"{job.summary()}\n{memory}")
    show(f"start it with: {command} {shlex.quote(str(out))}" if command else f"{out} has one command line per node")
