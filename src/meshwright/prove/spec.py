"""Specification of a proof: what is configured otherwise, and what is set aside or refused. Doesn't import torch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.comm.compression.catalogue import find_method, is_lossy
from meshwright.config.facts_for_family import run_facts
from meshwright.config.rules import lossless_value, lossy_keys
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.features.registry import plan_features
from meshwright.optim.catalogue import OptimizerState
from meshwright.pipeline.schedule_table import Schedule
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.result import ProofResult
from meshwright.settings.violation import format_fix

PROOF_STEPS = 3
"""Optimizer steps that a proof in float64 compares by default."""


@dataclass(frozen=True)
class ProofSpec:
    """Configuration and plan to prove, and the folder through which processes exchange files."""

    config: RunConfig
    plan: RunPlan
    num_steps: int
    folder: Path
    """Folder for the ranks' records and the result."""
    as_run: bool = False
    """Whether to prove the run as configured, or in float64."""

    def record(self, rank: int) -> Path:
        """Return the path of a rank's record."""
        return self.folder / f"rank-{rank}.pt"

    @property
    def result(self) -> Path:
        """Path of the pickled result and the name of the unit of losses; a second pass completes it."""
        return self.folder / "result.pickle"

    def load_result(self) -> tuple[ProofResult, str]:
        """Return the result so far, and the name of the unit of losses."""
        found: tuple[ProofResult, str] = pickle.loads(self.result.read_bytes())
        return found

    def activations(self, rank: int) -> Path:
        """Return the path of a rank's activations, recorded by a second pass."""
        return self.folder / f"activations-{rank}.pt"

    def step_to_locate(self) -> int:
        """Return the step whose forward goes wrong, from the result so far."""
        step = self.load_result()[0].locate_step
        assert step is not None, "a second pass is made only where there is one"
        return step


def in_float64(config: RunConfig) -> RunConfig:
    """Return the configuration of the proof in float64 that explains one as run: without lossy compression.

    Raises:
        ConfigError: the layout takes no lossless communication.
    """
    return as_proof(config.with_keys({key: lossless_value(key) for key in lossy_keys(config)}))


def as_proof(config: RunConfig) -> RunConfig:
    """Return the configuration to prove: in float64, without what features set aside, otherwise unchanged.

    It computes on the CPU, where captured layers are simulated from the second step on, unless `train.device=cuda` asks
    for GPUs, of which each rank needs one.

    The model family may override other keys. For example, gates initialized to zero make nearly all gradients of the
    first step zero, and comparing zeros proves nothing.

    Raises:
        ConfigError: gradients or weights are communicated with lossy compression.
    """
    _refuse_lossy(lossy_keys(config))
    keys: dict[str, Any] = {
        "train.precision": "float64",
        "train.device": device(config),
        "train.compile": False,
        "capture.backend": "auto",
    }
    for feature in plan_features(config=config):
        keys |= feature.in_proof(config)
    return config.with_keys({**keys, **config.family.proof(run_facts(config))})


def device(config: RunConfig) -> str:
    """Return the value of `train.device` in a proof: cuda if the configuration names it, else cpu, whose processes may
    be more than there are GPUs."""
    return "cuda" if config.train.device == "cuda" else "cpu"


def set_aside(config: RunConfig, plan: RunPlan) -> tuple[str, ...]:
    """Return a line for each setting that a proof in float64 leaves out.

    Args:
        config: configuration of the run.
        plan: plan of the run as configured, or as given.
    """
    found: list[str] = []
    if config.train.precision != "float64":
        found.append(f"train.precision={config.train.precision} is set aside: a proof computes in float64")
        if device(config) == "cuda":
            found.append("kernels that have no float64 are set aside, such as FlashAttention and grouped products")
    if any(kind.compiled for kind in plan.kinds):
        found.append("train.compile=true is set aside: a proof runs eagerly")
    found += [line for one in plan_features(config=config, plan=plan) if (line := one.set_aside(config))]
    if found:
        found[-1] += " (--as-run proves the run as configured)"
    return (*found, *overridden(config))


def overridden(config: RunConfig) -> Iterator[str]:
    """Yield a line for each key that the family's proofs override."""
    for key, value in config.family.proof(run_facts(config)).items():
        section, _, name = key.partition(".")
        found = getattr(getattr(config, section), name)
        if found != value:
            yield f"{key}={str(found).lower()} is set aside: with it, the first gradients are zero and prove nothing"


SMALL_LIMIT = 0.1
"""Limit of the norm in the last step, as a share of the first norm, if no step before was clipped."""


def clip_limit(config: RunConfig, norms: Sequence[float], *, step: int, num_steps: int) -> float:
    """Return the limit of the gradient's norm in a step of a proof.

    It is the configured one, except in the last step if no gradient was clipped before: clipping that never acts would
    not be proved.

    Args:
        config: configuration of the proof.
        norms: norms of the steps before.
        step: step, from 1.
        num_steps: steps of the proof.
    """
    limit = config.train.max_grad_norm
    if step == num_steps > 1 and not any(norm > limit for norm in norms):
        return SMALL_LIMIT * norms[0]
    return limit


def plan_in_float64(plan: RunPlan) -> RunPlan:
    """Return the plan to prove: all dtypes are float64, and nothing is compiled.

    Raises:
        ConfigError: gradients or weights are communicated with lossy compression.
    """
    units = [unit for stage in plan.stages for unit in plan.units(stage)]
    lossy = [f"comm.{use}" for use in ("gradients", "weights") if any(is_lossy(getattr(u, use)) for u in units)]
    _refuse_lossy(lossy)
    proved: RunPlan = _in_float64(plan)
    for feature in plan_features(plan=plan):
        proved = feature.plan_in_proof(proved)
    return replace(proved, kinds=tuple(replace(kind, compiled=False) for kind in proved.kinds))


def _in_float64(value: Any) -> Any:
    if isinstance(value, OptimizerState) and value.dims == ():
        return value  # a count of updates, in the dtype that the optimizer asks for
    if is_dataclass(value) and not isinstance(value, type | Schedule):
        return replace(value, **{field.name: _in_float64(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple):
        return tuple(_in_float64(item) for item in value)
    return "float64" if value in ("float32", "bfloat16") else value


def _refuse_lossy(lossy: list[str]) -> None:
    if lossy:
        raise ConfigError(
            f"cannot prove a layout with lossy {' and '.join(lossy)}",
            where=", ".join(lossy),
            rule="a proof needs lossless communication; exact-via-all-to-all takes the code path of compressed "
            "gradients without losing precision, and --as-run proves lossy communication",
            fix=format_fix({key: lossless_value(key) for key in lossy}),
        )


DEFAULT_STEPS = 4
FEEDBACK_STEPS = 12
"""Steps over which broken error feedback stands out: its errors grow at least like √12, and working ones don't grow."""


def as_configured(config: RunConfig) -> RunConfig:
    """Return the configuration to prove as run, with the overrides of the family's proofs: on GPUs if `train.device` is
    cuda, else on the CPU, which has no graphs to capture."""
    keys: dict[str, Any] = {"train.device": device(config)}
    if keys["train.device"] == "cpu":
        keys["capture.backend"] = "eager" if config.train.compile else "simulate"
    return config.with_keys({**keys, **config.family.proof(run_facts(config))})


def has_feedback(plan: RunPlan) -> bool:
    """Return whether gradients of several ranks are reduced with error feedback."""
    sends = plan.mesh.view("fsdp") + plan.mesh.view("replicas")
    units = (unit for stage in plan.stages for unit in plan.units(stage))
    return plan.mesh.size(*sends) > 1 and any(find_method(unit.gradients).feedback for unit in units)


def num_steps(plan: RunPlan, asked: int | None) -> int:
    """Return the number of steps to compare.

    Raises:
        ConfigError: the steps asked for are too few to tell whether error feedback works.
    """
    least = FEEDBACK_STEPS if has_feedback(plan) else 1
    if asked is not None and asked < least:
        raise ConfigError(
            f"{asked} steps are too few to prove error feedback",
            where="command line, --steps",
            rule="without feedback the errors of a codec grow with the steps, which takes some steps to tell",
            fix=f"--steps {least}, or more; or leave it out",
        )
    return max(DEFAULT_STEPS, least) if asked is None else asked


def set_aside_as_run(config: RunConfig) -> Iterator[str]:
    """Yield a line for each setting that a proof as run doesn't follow."""
    if config.capture.scope and device(config) == "cpu":
        how = "runs eagerly on the inputs of its graphs" if config.train.compile else "is simulated"
        yield f"capture.scope={','.join(config.capture.scope)} {how}: there are no CUDA graphs on the CPU"
    yield from overridden(config)
