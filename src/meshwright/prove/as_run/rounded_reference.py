"""Reference of a proof as run, at the parameters of the layout, and how much rounding changes it.

At each step the plain module is evaluated in float64 at the parameters that the layout holds, so that errors of earlier
steps don't add up. It is then evaluated in the precision of the run, at parameters perturbed by up to one rounding
unit: the deviations from float64, per tensor, are what a right layout may deviate by (TTrace, arXiv 2506.09280).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.config.schema import RunConfig
from meshwright.models.contract.task import Reference
from meshwright.nn.experts.router import Router
from meshwright.nn.step_handles import auxiliary_losses, step_buffers
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.as_run.plain_quantiser import flatten, quantise, sent_units, unflatten
from meshwright.prove.record.evidence import DTYPE
from meshwright.prove.record.reference_run import TensorsByName, build_reference, forward_backward, trained_parameters

PERTURBATIONS = (0.0, 1.0)
"""Evaluations per step, by the largest change of a parameter in rounding units. The first rounds as the run does: where
many parameters are nearly equal, they are rounded in the same direction."""
TIE_UNITS = 2.0
"""Rounding units by which the scores of a token's last chosen and next best expert may differ in a tie."""


@dataclass(frozen=True)
class Sensitivity:
    """Relative deviations of a step's reference when it is rounded, the largest of all evaluations."""

    gradients: dict[str, float]
    """Per parameter: norm of the deviation over the norm of the gradient."""
    loss: float
    choices: dict[str, float]
    """Deviations of gradients if choices of experts that are near ties are turned; empty without experts."""


@dataclass(frozen=True)
class StepReference:
    """Reference of one step at the layout's parameters."""

    loss: float
    partial_gradients: TensorsByName
    """Per parameter, [data_parallel, num_microbatches, *shape]: contributions, which sum to the gradient."""
    rounded: TensorsByName
    """Contributions computed in the precision of the run, at perturbed parameters."""
    sensitivity: Sensitivity

    def gradients(self) -> TensorsByName:
        """Return the full gradients."""
        return {name: partial.sum((0, 1)) for name, partial in self.partial_gradients.items()}


class RoundedReference:
    """Evaluates the reference of each step in float64 and, perturbed, in the precision of the run.

    Args:
        config: configuration returned by `as_configured`.
        plan: plan of the run, for the weights that are sent with a lossy method.
        samples: loss of samples.
    """

    def __init__(self, config: RunConfig, plan: RunPlan, samples: Reference) -> None:
        self._config, self._samples = config, samples
        self._num_shards = plan.mesh.size(*plan.mesh.view("fsdp"))
        self._sent_units = sent_units(plan, lambda unit: unit.weights, self._num_shards)
        self._exact = build_reference(config)
        self.initial: TensorsByName = {name: value.clone() for name, value in _tensors(self._exact)}
        self._dtype = getattr(torch, config.train.precision)
        self._rounded = _in_precision(build_reference(config), self._dtype)
        self._generator = torch.Generator().manual_seed(config.train.seed)

    def step(self, weights: Mapping[str, Tensor], indices: list[int]) -> StepReference:
        """Evaluate a step at the layout's full parameters and buffers, on samples `indices`."""
        exact = self._evaluate(self._exact, weights, indices)
        deviations = []
        rounded: TensorsByName = {}
        for units in PERTURBATIONS:
            loss, rounded = self._evaluate(self._rounded, self._sent(self._perturbed(weights, units)), indices)
            errors = {
                name: relative_error(value.sum((0, 1)), exact[1][name].sum((0, 1))) for name, value in rounded.items()
            }
            deviations.append(Sensitivity(errors, abs(loss / exact[0] - 1), {}))
        gradients = {name: max(one.gradients[name] for one in deviations) for name in rounded}
        found = Sensitivity(gradients, max(one.loss for one in deviations), self._choices(weights, indices, exact[1]))
        return StepReference(*exact, rounded, found)

    def _choices(self, weights: Mapping[str, Tensor], indices: list[int], exact: TensorsByName) -> dict[str, float]:
        """Return the relative deviations of gradients if all choices of experts that are near ties are turned."""
        if not has_choices(self._exact):
            return {}
        with turned_ties(self._exact, torch.finfo(self._dtype).eps):
            _, turned = self._evaluate(self._exact, weights, indices)
        return {name: relative_error(value.sum((0, 1)), exact[name].sum((0, 1))) for name, value in turned.items()}

    def _evaluate(
        self, model: nn.Module, weights: Mapping[str, Tensor], indices: list[int]
    ) -> tuple[float, TensorsByName]:
        with torch.no_grad():
            for name, tensor in _tensors(model):
                tensor.copy_(weights[name])
        for _, handle in auxiliary_losses(model):
            handle.scale = 1.0 / self._config.train.global_batch
        batch = forward_backward(model, self._config, self._samples, indices)
        for _, buffer in step_buffers(model):
            buffer.discard()
        partial = {name: value.to(DTYPE) for name, value in batch.partial_gradients.items()}
        return float(batch.partial_losses.sum()), partial

    def _perturbed(self, weights: Mapping[str, Tensor], units: float) -> TensorsByName:
        trained, limit = trained_parameters(self._exact), units * torch.finfo(self._dtype).eps
        found = dict(weights)
        for name in trained if limit else ():
            noise = torch.rand(weights[name].shape, generator=self._generator, dtype=DTYPE) * 2 - 1
            found[name] = weights[name].to(DTYPE) * (1 + limit * noise)
        return found

    def _sent(self, weights: TensorsByName) -> TensorsByName:
        """Return parameters as ranks receive them, if a lossy method gathers them."""
        found = dict(weights)
        for unit in self._sent_units:
            sent = flatten([weights[name].to(DTYPE) for name in unit.names], self._num_shards)
            flat, _ = quantise(sent, unit.method)
            found |= unflatten(flat, {name: weights[name].shape for name in unit.names})
        return found


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers by name, tied ones once."""
    saved = model.state_dict()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved:
            yield name, tensor.detach()


def _in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let a model compute in `dtype`, with buffers at least in float32, and return float64."""
    wide = torch.promote_types(dtype, torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(wide))

    def cast(_: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    model.register_forward_pre_hook(cast)
    model.register_forward_hook(lambda _, __, out: out.to(DTYPE))
    return model


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor; infinity if either is not finite."""
    error = float((found - expected).norm() / expected.norm()) if bool(expected.any()) else float(bool(found.any()))
    return error if error == error else float("inf")


def has_choices(model: nn.Module) -> bool:
    """Return whether a model chooses experts by scores."""
    return any(isinstance(module, Router) and not module.config.uniform for module in model.modules())


@contextmanager
def turned_ties(model: nn.Module, unit: float) -> Iterator[None]:
    """Within the context, give each token at a tie the next best expert instead of its last.

    Args:
        model: the plain model.
        unit: rounding unit of the run's precision.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.best = _turned(router.best, TIE_UNITS * unit)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for router in routers:
            del router.best


def _turned(best: Callable[[Tensor], Tensor], tie: float) -> Callable[[Tensor], Tensor]:
    def choose(scores: Tensor) -> Tensor:
        chosen = best(scores)
        last = chosen[..., -1:]
        others = best(scores.scatter(-1, last, -torch.inf))
        score, next_score = scores.gather(-1, last), scores.gather(-1, others[..., -1:])
        return torch.where((score - next_score).abs() <= tie * score.abs(), others, chosen)

    return choose
