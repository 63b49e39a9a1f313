"""Plan, run and prove from Python: the verbs of the command line as functions that return values.

They start processes of their own, as the commands do, so a notebook's kernel holds no accelerator and no process group,
and imports no torch for them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.manifest import newest_complete
from meshwright.config.facts_for_family import run_facts
from meshwright.config.load import known_keys
from meshwright.config.rules import check
from meshwright.config.schema import RunConfig
from meshwright.plan.load_config import load
from meshwright.plan.load_plan import check_fits, load_plan
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import violations
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.verify import verify
from meshwright.prove.spec import ProofSpec, as_proof, plan_in_float64
from meshwright.train.launch.launcher import Interrupts, launch
from meshwright.train.launch.machine_limits import check_machine
from meshwright.train.launch.run_spec import RunSpec
from meshwright.train.record.loss_curves import read_metrics
from meshwright.train.record.reporter import Reporter
from meshwright.train.run_folder import choose_folder

if TYPE_CHECKING:
    from meshwright.train.launch.rank_context import RankContext

MakeReporter = Callable[[], Reporter]
"""Makes what is told of a run, in its rank 0: picklable, as a class of a module is."""
Say = Callable[[str], None]
"""Told what a longer wait is for."""


def load_config(source: str | Path | None = None, *words: str) -> RunConfig:
    """The configuration of a run: a preset's or a file's, with words over it, checked against every rule.

    Args:
        source: a preset (`meshwright presets` lists them), or the path of a TOML file; llama-tiny when None.
        words: `section.key=value`, as on the command line.

    Raises:
        ConfigError: an unknown preset, key or value. LayoutError: a mesh, batch or stages that do not fit.
    """
    return load(None if source is None else str(source), words)


def plan(config: RunConfig, *, nodes: int | tuple[int, ...] | None = None) -> RunPlan:
    """The run as a value: stages, units, styles, reductions and the schedule, verified.

    Args:
        config: of the run.
        nodes: neighbouring ranks on a machine, or the node of each rank, where `comm.ranks_per_node` does not say.

    Raises:
        ConfigError, LayoutError: the configuration violates a rule; or the plan would train wrongly, which is a fault
            of a family's description.
    """
    _check(config)
    made = make_plan(config, nodes=nodes)
    verify(made)
    return made


@dataclass(frozen=True)
class RunResult:
    """Losses, folder and checkpoint of a run."""

    folder: Path
    losses: tuple[float | None, ...]
    """Of each step from the first, in nats a token or as the model has it; None where one was not finite."""
    validation: float | None
    """The last validation's loss; None without one."""
    checkpoint: Path | None
    """The newest."""


def run(
    config: RunConfig,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    plan: RunPlan | str | Path | None = None,
    reporter: MakeReporter = Reporter,
    on_interrupt: Interrupts | None = None,
    say: Say | None = None,
) -> RunResult:
    """Train: start the processes that the mesh needs on this machine, and wait for them.

    Args:
        config: of the run.
        out: the run folder; `runs/<name>-<n>` when None.
        resume: `auto` goes on from the folder's newest checkpoint; or a checkpoint's path.
        plan: made or changed by hand, or the path of one in a file; the configuration's own when None.
        reporter: what is told of the run; nobody is by default.
        on_interrupt: called at the first Ctrl-C, after which the run saves and ends; when None, Ctrl-C ends it at once.
        say: told what the start waits for.

    Raises:
        MeshwrightError: bad input, before any process starts; or what a rank raised, with its rank and step.
    """
    say = say or _nobody
    _check(config)
    made = make_plan(config) if plan is None else _given(plan, config)
    check_machine(config, made)
    say("reading the corpus")
    corpus = config.family.open_data(run_facts(config))
    num_ranks = config.mesh.axes().num_ranks()
    with ExitStack() as hold:
        path = None if out is None else Path(out)
        start = None if resume is None else str(resume)
        folder = choose_folder(config, out=path, resume=start, corpus=corpus.fingerprint, hold=hold)
        say(f"starting {num_ranks} process{'es' if num_ranks > 1 else ''}")
        launch(
            run_body,
            RunSpec(config, reporter, plan=made, folder=folder),
            num_ranks=num_ranks,
            threads=config.train.threads,
            on_interrupt=on_interrupt,
            describe_action=made.describe_action,
        )
        lines = list(read_metrics(folder.metrics))
    validated = [line["validation_loss"] for line in lines if line.get("validation_loss") is not None]
    return RunResult(
        folder=folder.path,
        losses=tuple(line["loss"] for line in lines),
        validation=validated[-1] if validated else None,
        checkpoint=newest_complete(folder.checkpoints),
    )


@dataclass(frozen=True)
class Proof:
    """Result of a proof; true where it passed."""

    passed: bool
    lines: tuple[str, ...]
    """For people."""
    report: Mapping[str, Any] = field(repr=False)
    """For programs, as `meshwright prove --json` writes it."""

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return "\n".join((*self.lines, "PROVED" if self.passed else "NOT PROVED"))


def prove(
    config: RunConfig, *, steps: int = 3, plan: RunPlan | str | Path | None = None, say: Say | None = None
) -> Proof:
    """Prove in float64 that a layout computes the same losses, gradients and parameters as one process.

    Args:
        config: of the run; its dtypes become float64, its device the CPU.
        steps: optimizer steps to compare.
        plan: as of `run`.
        say: told what it waits for.

    Raises:
        MeshwrightError: bad input, before any process starts; or what a rank raised.
    """
    say = say or _nobody
    _check(config)
    proved = as_proof(config)
    made = make_plan(proved) if plan is None else plan_in_float64(_given(plan, config))
    axes, threads = proved.mesh.axes(), proved.train.threads
    proved.family.open_data(run_facts(proved))
    with tempfile.TemporaryDirectory(prefix="meshwright-proof-") as folder:
        spec = ProofSpec(proved, made, steps, Path(folder))
        say(f"{proved.name} · {axes} · {steps} steps in float64 …")
        launch(record_body, spec, num_ranks=axes.num_ranks(), threads=threads, describe_action=made.describe_action)
        say("comparing with the reference: one process, a plain module, a plain loop …")
        launch(compare_body, spec, num_ranks=1, threads=threads)
        answer = json.loads(spec.result.read_text("utf-8"))
    say("")
    return Proof(answer["report"]["passed"], tuple(answer["lines"]), answer["report"])


def run_body(context: RankContext, spec: RunSpec) -> None:
    """Be one rank of a run; torch is imported here, not in the process that starts it."""
    from meshwright.train.rank_run import run_rank

    run_rank(context, spec)


def record_body(context: RankContext, spec: ProofSpec) -> None:
    """Be one rank of a layout under proof; torch is imported here."""
    from meshwright.prove.driver import record_layout

    record_layout(context, spec)


def compare_body(context: RankContext, spec: ProofSpec) -> None:
    """Compute the reference and compare; torch is imported here."""
    from meshwright.prove.driver import compare_with_reference

    compare_with_reference(context, spec)


def _check(config: RunConfig) -> None:
    """Check the rules, which `with_keys` doesn't look at."""
    check(config, dict.fromkeys(known_keys(config.model.kind), "the configuration"), rules=violations)


def _given(plan: RunPlan | str | Path, config: RunConfig) -> RunPlan:
    if isinstance(plan, RunPlan):
        return check_fits(plan, config, where="plan")
    return load_plan(Path(plan), config)


def _nobody(text: str) -> None:
    pass
