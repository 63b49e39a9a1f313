"""The contract of features: their share of a plan, and their work in a run.

A subclass overrides what it needs, and all else does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwright.checkpoint.manifest import Manifest
    from meshwright.config.schema import RunConfig
    from meshwright.models.contract.model_facts import KindFacts, ModelFacts, Saved
    from meshwright.models.contract.tp_styles import LossReductions
    from meshwright.plan.run_plan import LayerSpec, PlannedOperator, RunPlan, Stage
    from meshwright.plan.traffic import LinkBytes, Traffic
    from meshwright.plan.verify.names import PlanError
    from meshwright.prove.record.evidence import Evidence
    from meshwright.prove.result import Diagnosis
    from meshwright.settings.violation import Fix, Violation
    from meshwright.train.build_job import Job
    from meshwright.train.pipeline_stages import Pipeline
    from meshwright.train.record.reporter import CountedBytes


@dataclass(frozen=True)
class KindPart:
    """A feature's part of a kind; written in plans as the kind's field of the feature's name."""

    feature: ClassVar[str]

    def loss_reductions(self) -> LossReductions | None:
        """Return how it reduces a loss over a sharded vocabulary; None if it changes nothing of that."""
        return None


P = TypeVar("P", bound=KindPart)


class PlanFeature(Generic[P]):
    """A feature before a run starts: its rules, and its share of a plan."""

    part: type[P]
    """Type of what it adds to kinds."""

    def rules(self, config: RunConfig) -> Iterator[Violation]:
        """Yield violations of the feature's rules."""
        return iter(())

    def make(self, config: RunConfig, model: ModelFacts, kind: KindFacts, layer: int | None) -> P | None:
        """Return what it adds to the kind of a block, or of an end, where `layer` is None."""
        return None

    def faults(self, plan: RunPlan) -> Iterator[PlanError]:
        """Yield faults of what it added to a plan, which may have been edited by hand."""
        return iter(())

    def saved(self, facts: KindFacts, part: P, *, tp: int, compiled: bool) -> Iterator[Saved]:
        """Yield changes of the tensors that a kind saves for its backward."""
        return iter(())

    def operators(
        self, facts: KindFacts, part: P, operators: tuple[PlannedOperator, ...], *, samples: int
    ) -> tuple[PlannedOperator, ...]:
        """Return what a rank computes in a kind, given what it would without the feature; `samples` are those of a
        micro-batch."""
        return operators

    def weight_bytes(self, plan: RunPlan, stage: Stage) -> int:
        """Return the bytes of weights that it keeps besides a stage's parameters."""
        return 0

    def output_bytes(self, plan: RunPlan, kind: LayerSpec, part: P, whole: int) -> int:
        """Return the bytes that an end with a part of the feature keeps of its output and the output's gradient, per
        micro-batch, given those of all of them."""
        return whole

    def page(self, plan: RunPlan) -> Iterator[tuple[str, ...]]:
        """Yield the words of each row of a plan's page; the first row is the heading."""
        return iter(())

    def in_proof(self, config: RunConfig) -> Fix:
        """Return the keys that a proof in float64 sets."""
        return {}

    def plan_in_proof(self, plan: RunPlan) -> RunPlan:
        """Return the plan that a proof in float64 runs in place of a given one."""
        return plan

    def plan_in_trace(self, plan: RunPlan) -> RunPlan:
        """Return the plan that the second pass of a proof runs, which records values that the feature never holds."""
        return plan

    def set_aside(self, config: RunConfig) -> str:
        """Return a line about what a proof in float64 leaves out; '' if that is nothing."""
        return ""


class RunFeature:
    """A feature on ranks: how it changes a stage's blocks, and its state."""

    def before_styles(self, part: nn.Module, kind: LayerSpec) -> None:
        """Change a plain block or, of an end, its stage, on the meta device, before tensor parallelism shards it."""

    def start(self, job: Job) -> OnRank:
        """Return its state on this rank, once model and optimizer are built."""
        return OnRank()


class InReference:
    """A feature in the reference of a proof as run, by its definition, with the state that ranks recorded. A step is
    evaluated by the layout's micro-batches."""

    def __init__(self, plan: RunPlan, evidence: Evidence) -> None:
        """Take the plan, and what ranks recorded."""

    perturbation = 0.0
    """Least relative change of parameters, by which the proof measures what rounding changes."""

    def apply(self, model: nn.Module) -> None:
        """Let a plain model compute with the feature."""

    def begin(self, step: int) -> None:
        """Start a step of any model that it was applied to."""

    def end(self, step: int) -> None:
        """End a step of the reference."""

    def findings(self) -> Iterator[tuple[int, Diagnosis]]:
        """Yield the steps in which the state that ranks recorded is wrong, and what is wrong."""
        return iter(())


class OnRank:
    """State of a feature on a rank. All ranks call each method, in the order of this class."""

    saved_as: str = ""
    """Key of `identity` in checkpoints."""
    identity: Mapping[str, Any] = {}
    """Facts that saved state must agree with to be restored."""

    def attach(self, pipeline: Pipeline) -> None:
        """Take the rank's pipeline, before the first training step; not called where none is trained."""

    def restore(self, path: Path, manifest: Manifest) -> str:
        """Restore the state from a checkpoint; return the reason if it starts from nothing, else ''."""
        return ""

    def counting(self) -> AbstractContextManager[None]:
        """Return a context for a training step of a run, in which what the feature sends counts."""
        return nullcontext()

    def is_steady(self) -> bool:
        """Return whether steps run as they will from now on, so that they can be measured."""
        return True

    def begin(self) -> None:
        """Start a step, before its first forward."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context for the forwards and backwards of a step."""
        return nullcontext()

    def end_step(self, *, applied: bool) -> None:
        """End a step; `applied` is False if it was skipped."""

    def evidence(self) -> dict[str, list[float]]:
        """Return the state that a proof as run records, after the backward of a step."""
        return {}

    def notes(self) -> Iterator[str]:
        """Yield news for the user after a step, each once."""
        return iter(())

    def state(self) -> dict[str, Tensor]:
        """Return tensors for a checkpoint."""
        return {}

    def sent(self) -> LinkBytes | None:
        """Return the bytes sent so far in collectives of its own, also in validations; None without any."""
        return None

    def traffic(self) -> Traffic | None:
        """Return what its own collectives sent in the steps counted, to be shown beside the prediction."""
        return None

    def all_to_alls(self) -> tuple[CountedBytes, ...]:
        """Return the bytes of all-to-alls in the steps counted, by purpose."""
        return ()
