"""Record what the modules of a model take and return, and the gradients of these, on ranks that train up to a failing
step again, and in the reference alike.

An attention core is not a module, so that it can be replaced; its queries, keys, values and output are recorded too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.features.registry import plan_features
from meshwright.models.contract.family import TrainingData
from meshwright.nn.attention.attention import ScoreRules
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import shard_indices
from meshwright.nn.step_handles import StepHandle
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.placement import ContextPlacement
from meshwright.prove.record.layout_run import Tamper, start_job
from meshwright.prove.record.reference_run import PlainModel, cells_of, count_over_batch, prepare_handles, set_weights
from meshwright.train.launch.rank_context import RankContext

Values = dict[str, Tensor]
"""Values of a micro-batch by name, such as `input of blocks.0.ffn` and `gradient of the input of blocks.0.ffn`, in the
order in which they were computed."""
LAYER = re.compile(r"\.(\d+)(?=\.|$)")
"""Number of a layer in a module's name."""
CORE_VALUES = ("queries", "keys", "values")
GRADIENT = "gradient of the "
MODEL = "the model"
"""Name of the whole model, whose output may be another than that of its last module."""


class Probe:
    """Records values within `watch`, on the CPU.

    Args:
        store: return where the values of the micro-batch that runs go, or None if they are not to be recorded.
        is_first: whether the model has its first layers. If others stand in for them, what runs before the layers is
            given their zeros.
        is_last: whether the model returns the outputs that the loss takes.
    """

    def __init__(self, store: Callable[[], Values | None], *, is_first: bool = True, is_last: bool = True) -> None:
        self._store, self._is_first, self._is_last = store, is_first, is_last
        self._has_layers = is_first
        self.repeated: set[str] = set()
        """Names of values that were there twice; the order of their modules' calls may be that of a set."""
        self.scores: dict[str, ScoreRules] = {}
        """See `ReferenceTrace`."""

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Record the values of all comparable modules of a model: local shards, detached."""
        removed: list[Callable[[], None]] = []
        stands_in = any(vars(module).get("stands_in") for module in model.modules())
        removed.append(model.register_forward_pre_hook(lambda *_: self._restart(stands_in)).remove)
        if self._is_last:
            removed.append(model.register_forward_hook(partial(self._after, MODEL)).remove)
        for name, module in comparable_modules(model):
            removed.append(module.register_forward_pre_hook(partial(self._before, name)).remove)
            removed.append(module.register_forward_hook(partial(self._after, name)).remove)
            core = getattr(module, "core", None)
            if callable(core) and not isinstance(core, nn.Module):
                vars(module)["core"] = _ProbedCore(core, f"{name}.core", self)
                removed.append(partial(vars(module).__setitem__, "core", core))
        try:
            yield
        finally:
            for remove in removed:
                remove()

    def take(self, name: str, value: Any) -> None:
        """Record a value, and its gradient once it is known; a second value of a name is not recorded."""
        values = self._store()
        if values is None or not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            return
        if name in values:
            self.repeated.add(name)
            return
        values[name] = _local(value)
        if value.requires_grad:
            # Consumers of a tensor that is used several times are summed before the hook is called.
            value.register_hook(partial(_keep, values, f"{GRADIENT}{name}"))  # type: ignore[no-untyped-call]

    def _before(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._has_layers |= LAYER.search(name) is not None
        at = next((at for at, one in enumerate(args) if isinstance(one, Tensor)), None)
        if at is None or self._store() is None or not self._has_layers:
            return None
        value = args[at]
        if value.requires_grad:
            value = value.view_as(value)  # the gradient of this input, without that of who else reads the tensor
        self.take(f"input of {name}", value)
        return (*args[:at], value, *args[at + 1 :])

    def _restart(self, stands_in: bool) -> None:
        self._has_layers = self._is_first or not stands_in

    def _after(self, name: str, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        value = out[0] if isinstance(out, tuple) and out else out
        # Before the layers of a later stage, modules get zeros in place of a stream.
        stands_in = not self._has_layers and isinstance(value, Tensor) and not value.any()
        if not stands_in:
            self.take(f"output of {name}", value)


def _keep(values: Values, name: str, gradient: Tensor) -> None:
    values.setdefault(name, _local(gradient))


def _local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().cpu().clone()


def comparable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose values have the same meaning on all layouts, by name.

    Those inside a layer that counts tokens for experts are left out: its rows are in an order of the layout's own. So
    are modules that stand in for those of other stages.
    """
    inside: list[str] = []
    for name, module in model.named_modules():
        if not name or name.startswith(tuple(inside)):
            continue
        if vars(module).get("stands_in"):
            inside.append(f"{name}.")
            continue
        if any(isinstance(child, StepHandle) for child in module.children()):
            inside.append(f"{name}.")
        yield name, module


class _ProbedCore:
    """An attention core whose arguments and outputs are recorded."""

    def __init__(self, core: Any, name: str, probe: Probe) -> None:
        self._core, self._name, self._probe = core, name, probe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def __call__(self, *args: Any) -> Any:
        for what, value in zip(CORE_VALUES, args, strict=False):
            self._probe.take(f"{what} of {self._name}", value)
        for one in args:
            if isinstance(one, ScoreRules):
                self._probe.scores[self._name] = one
        out = self._core(*args)
        self._probe.take(f"output of {self._name}", out)
        return out


FORWARD = re.compile(r"(\d+)F(\d+)")
"""Label of a pipeline action that runs a forward: its stage and micro-batch."""


@dataclass
class RankTrace:
    """What a rank records in the failing step; only numbers and tensors, as for `RankRecord`."""

    values: dict[int, Values] = field(default_factory=dict)
    """Values by micro-batch."""
    repeated: list[str] = field(default_factory=list)
    """Values that several stages of the rank compute, each with its part of the gradient."""


def trace_rank(
    config: RunConfig,
    context: RankContext,
    data: TrainingData,
    *,
    step: int,
    plan: RunPlan,
    tamper: Tamper | None = None,
) -> RankTrace:
    """Train up to a step on this rank, and return the values in the forwards and backwards of that step.

    Args:
        config: configuration returned by `as_proof` or `as_configured`.
        context: context of this rank.
        data: training data.
        step: step to record, from 1.
        plan: plan of the layout.
        tamper: as for `record_rank`.
    """
    for feature in plan_features(plan=plan):
        plan = feature.plan_in_trace(plan)
    job, run_step, _ = start_job(config, context, data, plan)
    if tamper is not None:
        tamper(job, run_step)
    for number in range(1, step):
        context.post("step", number)
        run_step.update(number, run_step.accumulate(number))
    context.post("step", step)
    found, running = RankTrace(), dict[int, int]()
    """The micro-batch whose forward runs, by stage. Recomputation runs modules within backward actions."""

    def store(stage: int) -> Values | None:
        return found.values.setdefault(running[stage], {}) if stage in running else None

    @contextmanager
    def label(actions: str) -> Iterator[None]:
        running.update((int(stage), int(microbatch)) for stage, microbatch in FORWARD.findall(actions))
        yield
        running.clear()

    run_step.label = label
    parts = job.parts().items()
    probes = [
        (Probe(partial(store, number), is_first=one.part.is_first, is_last=one.part.is_last), one.module)
        for number, one in parts
    ]
    with ExitStack() as watched:
        for probe, module in probes:
            watched.enter_context(probe.watch(module))
        run_step.accumulate(step)
    found.repeated = sorted(set().union(*(probe.repeated for probe, _ in probes)))
    return found


@dataclass(frozen=True)
class ReferenceTrace:
    """Values of a step in one process."""

    plain: PlainModel
    """The plain model, at the weights of the step."""
    values: list[Values]
    """Values of each micro-batch of each data-parallel rank."""
    samples: tuple[tuple[int, ...], ...]
    """Samples of each cell."""
    layouts: list[TokenLayout | None]
    """Documents of each cell, for models of tokens."""
    targets: list[Tensor]
    """Targets of each cell."""
    tokens: dict[int, list[Tensor]]
    """Per cell, the positions [t] or [b, t] of the tokens on each context-parallel rank; empty without any."""
    earlier: Sequence[Mapping[str, Tensor]] = ()
    """Weights before the steps before this one."""
    scores: dict[str, ScoreRules] = field(default_factory=dict)
    """Rules of scores of attention cores that have others than the plain ones, by name."""


def trace_reference(
    plain: PlainModel,
    data: TrainingData,
    *,
    step: int,
    weights: Sequence[Mapping[str, Tensor]],
    context: ContextPlacement | None,
) -> ReferenceTrace:
    """Run the micro-batches of a step forward and backward in one process.

    The module gets the task's own batches, made here, since a reference may take samples apart: what the ranks' samples
    were is compared before, by content.

    Args:
        plain: the plain model.
        data: training data.
        step: the step.
        weights: full weights before each step up to this one.
        context: placement of tokens on context-parallel ranks, if there are any.
    """
    config, model, batch = plain.config, plain.module, plain.batch(step)
    set_weights(model, weights[step - 1])
    prepare_handles(model, config)
    count_over_batch(model, plain.samples, batch)
    task = config.family.task(replace(run_facts(config), precision="float64"), data, torch.device("cpu"))
    num_units = task.count(range(batch[0], batch[-1] + 1))
    found = ReferenceTrace(plain, [], tuple(map(tuple, cells_of(config, batch))), [], [], {}, weights[: step - 1])
    for cell, inside in enumerate(found.samples):
        values: Values = {}
        one = task.batch(range(inside[0], inside[-1] + 1))
        probe = Probe(lambda values=values: values)  # type: ignore[misc]
        with probe.watch(model):
            out = config.family.run(model, one.inputs, one)
            torch.autograd.backward(task.loss_sum(out, one.targets) / num_units)
        model.zero_grad(set_to_none=True)
        layout = next((part for part in one.conditions if isinstance(part, TokenLayout)), None)
        repeated = probe.repeated | {f"{GRADIENT}{name}" for name in probe.repeated}
        found.values.append({name: value for name, value in values.items() if name not in repeated})
        found.scores.update(probe.scores)
        found.layouts.append(layout)
        found.targets.append(one.targets)
        if context is not None and layout is not None:
            found.tokens[cell] = [shard_indices(shard) for shard in context.shards(layout.documents)]
    return found
