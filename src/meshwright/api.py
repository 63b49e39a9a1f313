"""Python API of the commands: plan, run and prove as functions that return values.

Like the commands, these functions start their own processes, so a notebook kernel holds no accelerator or process group
and need not import torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import newest_complete
from meshwright.config.facts_for_family import run_facts
from meshwright.config.load import known_keys
from meshwright.config.rules import check
from meshwright.config.schema import RunConfig
from meshwright.data.packed_corpus import WARNING
from meshwright.errors import MeshwrightError, RunError
from meshwright.models.contract.model_facts import unit_of_metric
from meshwright.models.hf.config import check_installed
from meshwright.models.hf.tiny_config import causal_types, text_type
from meshwright.optim.catalogue import BUILT_IN
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import check_fits, load, load_plan, violations
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.stage_sizes import replicated_note
from meshwright.plan.verify import verify
from meshwright.prove.bodies import PRELOAD, compare_body, locate_body, locate_compare_body, record_body
from meshwright.prove.catalogue import (
    ALL,
    EP,
    LAYOUTS,
    PACKED,
    SETTINGS,
    Result,
    has_experts,
    prove_all,
    write_documents,
)
from meshwright.prove.report import ended_to_json, render, render_ended, to_json
from meshwright.prove.result import ProofResult
from meshwright.prove.script.proof import prove_layouts
from meshwright.prove.spec import (
    PROOF_STEPS,
    ProofSpec,
    as_configured,
    as_proof,
    in_float64,
    num_steps,
    plan_in_float64,
    set_aside,
    set_aside_as_run,
)
from meshwright.train.choose_folder import choose_folder
from meshwright.train.launch.launcher import launch
from meshwright.train.launch.machine_limits import BusyCores, advice, check_machine
from meshwright.train.launch.rank_context import DATA, PLAN, RunSpec, StartTimes
from meshwright.train.launch.rank_start import run_body
from meshwright.train.record.record_files import loss_key, read_metrics
from meshwright.train.record.reporter import Reporter, reporting
from meshwright.train.record.trackers import check_trackers
from meshwright.train.run_folder import RunFolder
from meshwright.units import counted

MakeReporter = Callable[[], Reporter]
"""Picklable factory for the reporter on rank 0, such as a module-level class."""
Say = Callable[[str], None]
"""Callback that receives the reason for a long wait."""


def load_config(source: str | Path | None = None, *words: str) -> RunConfig:
    """Load a run's configuration from a preset or a file, apply overrides, and check every rule.

    Args:
        source: a preset (listed by `meshwright presets`) or the path of a TOML file; llama-tiny if None.
        words: overrides of the form `section.key=value`, as on the command line.

    Raises:
        ConfigError: a preset, key or value is unknown.
        LayoutError: the mesh, batch or stages do not fit together.
    """
    return load(None if source is None else str(source), words)


def plan(config: RunConfig, *, nodes: int | tuple[int, ...] | None = None) -> RunPlan:
    """Return a run's verified plan: stages, FSDP units, tensor-parallel styles, reductions and the schedule.

    Args:
        config: configuration of the run.
        nodes: consecutive ranks per node, or the node of each rank; ignored if `comm.ranks_per_node` is set.

    Raises:
        ConfigError: the configuration violates a rule.
        LayoutError: the layout does not fit, or a model family's faulty description makes the plan incorrect.
    """
    _check(config)
    made = make_plan(config, nodes=nodes)
    verify(made)
    return made


@dataclass(frozen=True)
class RunResult:
    """Result of a run: losses, folder and checkpoint."""

    folder: Path
    losses: tuple[float | None, ...]
    """Loss per step in `loss_unit`; None for steps with a non-finite loss, or recorded in another unit."""
    loss_unit: str
    """`bits/byte`, `nats/token` or `squared error`, as on the terminal; empty if the run has no steps."""
    validation: float | None
    """Last validation loss, in the same unit; None if there was no validation."""
    checkpoint: Path | None
    """Newest checkpoint, if any."""


def run(
    config: RunConfig,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    plan: RunPlan | str | Path | None = None,
    reporter: MakeReporter = Reporter,
    on_interrupt: Callable[[], None] | None = None,
    say: Say | None = None,
) -> RunResult:
    """Train a model: start the processes of the mesh on this machine and wait for them.

    Args:
        config: configuration of the run.
        out: the run folder; `runs/<name>-<n>` if None.
        resume: `auto` for the folder's newest valid checkpoint, or the path of a checkpoint.
        plan: a plan or the path of a plan file; if None, the plan is made from the configuration.
        reporter: factory for the reporter; nothing is reported by default.
        on_interrupt: called on the first Ctrl-C, after which the run saves and stops; if None, Ctrl-C kills the run.
        say: called with the reason for a long wait at startup.

    Raises:
        MeshwrightError: the input is invalid (raised before any process starts), or a rank failed; a failure names
            the rank and step.
    """
    say, others, times = say or _ignore, BusyCores(), StartTimes()
    _check(config)
    made = make_plan(config) if plan is None else _load_plan(plan, config)
    is_other = plan is not None and made != make_plan(config, nodes=made.mesh.nodes)
    verify(made)
    process_bytes = check_machine(config, made)
    check_trackers(config.train.trackers)
    _try_optimizer(made)
    times.end(PLAN)
    say("reading the data")
    corpus = config.family.open_data(run_facts(config))
    num_ranks = config.mesh.axes().num_ranks()
    with ExitStack() as hold:
        path = None if out is None else Path(out)
        start = None if resume is None else str(resume)
        folder = choose_folder(config, out=path, resume=start, corpus=corpus.fingerprint, hold=hold)
        times.end(DATA)
        say(f"starting {num_ranks} process{'es' if num_ranks > 1 else ''}")
        warning = advice(config.train.threads, num_ranks=num_ranks, others=others)
        notes = (warning,) if warning else ()
        with reporting(folder.path):
            launch(
                run_body,
                RunSpec(config, reporter, made, is_other, process_bytes, folder, notes, start=times),
                num_ranks=num_ranks,
                threads=config.train.threads,
                on_interrupt=on_interrupt,
                describe_action=made.describe_action,
                preload=config.family.preload,
            )
        return _result_of(folder)


def _result_of(folder: RunFolder) -> RunResult:
    lines = list(read_metrics(folder.metrics))
    key = loss_key(lines[-1] if lines else {})
    validated = [line[f"validation_{key}"] for line in lines if line.get(f"validation_{key}") is not None]
    return RunResult(
        folder=folder.path,
        losses=tuple(line.get(key) for line in lines),
        loss_unit=unit_of_metric(key),
        validation=validated[-1] if validated else None,
        checkpoint=newest_complete(folder.checkpoints),
    )


@dataclass(frozen=True)
class Proof:
    """Result of a proof; truthy if the proof passed."""

    passed: bool
    lines: tuple[str, ...]
    """Report as lines of text."""
    report: Mapping[str, Any] = field(repr=False)
    """Report as JSON values, as written by `meshwright prove --json`."""

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return "\n".join((*self.lines, "PROVED" if self.passed else "NOT PROVED"))


def prove(
    config: RunConfig,
    *,
    steps: int | None = None,
    plan: RunPlan | str | Path | None = None,
    as_run: bool = False,
    say: Say | None = None,
) -> Proof:
    """Prove that a layout computes the same losses, gradients and parameters as one process in float64.

    Args:
        config: configuration of the run; without `as_run` in float64, and on the CPU unless its device is cuda.
        steps: number of optimizer steps to compare; if None, 3, or what a proof as run needs.
        plan: a plan or the path of a plan file; if None, the plan is made from the configuration.
        as_run: prove the run as configured, in its precision, compiled and compressed, within measured tolerances.
        say: called with the reason for a long wait.

    Raises:
        MeshwrightError: the input is invalid (raised before any process starts).
    """
    say = say or _ignore
    _check(config)
    given = None if plan is None else _load_plan(plan, config)
    if as_run:
        proved, notes = as_configured(config), tuple(set_aside_as_run(config))
        made = given or make_plan(proved)
        steps = num_steps(made, steps)
    else:
        proved = as_proof(config)
        notes = set_aside(config, given or make_plan(config))
        made, steps = make_plan(proved) if given is None else plan_in_float64(given), steps or PROOF_STEPS
    _try_optimizer(made)
    description = proved.family.open_data(run_facts(proved)).description
    said = tuple(config.family.notes(run_facts(config)))
    warnings = tuple(line.strip() for line in description.splitlines() if WARNING in line)
    with tempfile.TemporaryDirectory(prefix="meshwright-proof-") as folder:
        spec = ProofSpec(proved, made, steps, Path(folder), as_run)
        try:
            result, loss_unit = _record_and_compare(spec, say)
        except RunError as error:
            say("")
            lines = (*warnings, *said, *notes, *render_ended(error))
            return Proof(False, lines, {**ended_to_json(error), "set_aside": list(notes)})
        if result.asks_for_float64 and given is None:
            say("a cause isn't known: proving the same layout in float64 …")
            result = _explain_in_float64(result, config, spec.folder / "float64", say)
    say("")
    report = to_json(result, loss_unit=loss_unit)
    lines = (*warnings, *said, *notes, *replicated_note(made), *render(result))
    return Proof(result.passed, lines, {**report, "set_aside": list(notes)})


def _record_and_compare(spec: ProofSpec, say: Say) -> tuple[ProofResult, str]:
    """Train as the ranks of a layout and compare with the reference, and locate what the cause isn't known of.

    Raises:
        RunError: a rank failed, or waited for too long.
    """
    config, plan = spec.config, spec.plan
    num_ranks, threads = config.mesh.axes().num_ranks(), config.train.threads
    preload = (*config.family.preload, *PRELOAD)
    say(f"{config.name} · {config.mesh.axes()} · {counted(spec.num_steps, 'step')} in {config.train.precision} …")
    describe = plan.describe_action
    launch(record_body, spec, num_ranks=num_ranks, threads=threads, describe_action=describe, preload=preload)
    say("comparing with the reference: one process, a plain module, a plain loop …")
    launch(compare_body, spec, num_ranks=1, threads=threads, preload=preload)
    result, loss_unit = spec.load_result()
    if result.locate_step is None:
        return result, loss_unit
    say("the forward may differ: looking for the place in a second pass …")
    try:
        launch(locate_body, spec, num_ranks=num_ranks, threads=threads, preload=preload)
        launch(locate_compare_body, spec, num_ranks=1, threads=threads, preload=preload)
    except MeshwrightError as error:  # what the first pass found is not lost
        note = f"where the forward goes wrong was not found, because the second pass failed: {error.what}"
        return replace(result, notes=(*result.notes, note)), loss_unit
    return spec.load_result()


def _explain_in_float64(result: ProofResult, config: RunConfig, folder: Path, say: Say) -> ProofResult:
    """Return a result as run with the causes of the same layout's proof in float64, where there is one."""
    folder.mkdir()
    try:
        proved = in_float64(config)
        return result.explained_by(
            _record_and_compare(ProofSpec(proved, make_plan(proved), PROOF_STEPS, folder), say)[0]
        )
    except MeshwrightError as error:
        note = f"the same layout can't be proved in float64, which might name the cause: {error.what}"
        return replace(result, notes=(*result.notes, note))


def prove_catalogue(
    models: Sequence[str] = (),
    *,
    words: Sequence[str] = (),
    steps: int = 2,
    say: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Prove every causal language model of the installed transformers, built small, on dp_shard 2, pp 2, tp 2, cp 2,
    with packed documents and, every fourth one, on the first three together; mixtures of experts on ep 2, too.

    Args:
        models: model types, such as qwen3; all if empty, which takes about half an hour on two cores. Given ones are
            proved on all layouts.
        words: further keys of every case, as on the command line.
        steps: optimizer steps to compare.
        say: called with each outcome.

    Raises:
        ConfigError: transformers is not installed, or has no such model.
    """
    check_installed()
    types = tuple(models) or causal_types()
    for one in models:
        text_type(one)

    def cases(documents: Path) -> Iterator[tuple[str, str, Callable[[], RunConfig]]]:
        for layout, keys in LAYOUTS.items():
            source = [f"data.source={documents}"] if layout == PACKED else []
            for number, model in enumerate(types):
                make = partial(load_config, "hf-tiny", f"model.config={model}", *SETTINGS)
                is_wanted = has_experts(make) if layout == EP else layout != ALL or models or number % 4 == 0
                if is_wanted:
                    yield model, layout, partial(make, *keys, *source, *words)

    with tempfile.TemporaryDirectory(prefix="meshwright-documents-") as folder:
        documents = Path(folder, "short.jsonl")
        write_documents(documents)
        return prove_all(cases(documents), steps=steps, say=say or _ignore)


def prove_script(
    script: str | Path,
    layouts: Sequence[str],
    *,
    arguments: Sequence[str] = (),
    steps: int = 3,
    timeout_s: float = 300.0,
    say: Say | None = None,
) -> Proof:
    """Prove that a training script, which uses `meshwright.prove.Recorder`, computes the same on several layouts.

    Args:
        script: path of the script.
        layouts: at least two; each a number of processes, then further arguments of the script. The first is the
            reference.
        arguments: arguments of the script on every layout.
        steps: optimizer steps to compare; the recorder ends the script after them.
        timeout_s: time limit of each run.
        say: called with the reason for a long wait.

    Raises:
        MeshwrightError: the input is invalid, the script failed, recorded too little, or is not deterministic.
    """
    say, path = say or _ignore, Path(script)
    lines, report = prove_layouts(path, layouts, arguments=arguments, steps=steps, timeout_s=timeout_s, say=say)
    return Proof(report["passed"], tuple(lines), report)


def _check(config: RunConfig) -> None:
    """Check every rule, since `RunConfig.with_keys` skips this."""
    check(config, dict.fromkeys(known_keys(config.model.kind), "the configuration"), rules=violations)


def _try_optimizer(plan: RunPlan) -> None:
    """Try an optimizer of the user's own, which has imported torch anyway."""
    if plan.optimizer.name not in BUILT_IN:
        from meshwright.train.own_optimizer import check_optimizer

        check_optimizer(plan)


def _load_plan(plan: RunPlan | str | Path, config: RunConfig) -> RunPlan:
    if isinstance(plan, RunPlan):
        return check_fits(plan, config, where="plan")
    return load_plan(Path(plan), config)


def _ignore(_: object) -> None:
    pass
