"""Float8 in the reference of a proof as run: linear layers cast by the definition, at the scales that the ranks used;
and the checks of delayed scales.

A product in float8 differs from an exact one by several percent, more than many faults change. So the reference casts
as the ranks do: each micro-batch of a data-parallel rank, the tokens of each context-parallel rank and each
tensor-parallel shard by itself. What is left are elements that rounding moves to the next float8 number.

Shapes: b samples, t tokens, d input and e output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.features.contract import InReference
from meshwright.features.float8.rules import Float8Layers
from meshwright.mesh.axes import Axes
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import shard_indices
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.placement import context_placement_of
from meshwright.prove.record.evidence import Evidence
from meshwright.prove.result import Diagnosis, FaultKind, coordinates, rank_words
from meshwright.units import counted, join_words

CASTS = ("inputs", "weights", "gradients")
"""What a layer casts, in the order of its magnitudes."""
GRADIENTS = CASTS.index("gradients")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-100
"""Smaller magnitudes count as this one."""


def to_float8(x: Tensor, dtype: torch.dtype, known: float = 0.0) -> Tensor:
    """Return x as float8 numbers times one scale, which maps a known magnitude, else the largest of x, to the largest
    float8 number (Micikevicius et al. 2022, section 3)."""
    largest = torch.finfo(dtype).max
    amax = known if known and bool(x.isfinite().all()) else float(x.abs().max())
    scale = torch.tensor(largest / max(amax, SMALLEST), dtype=torch.float32)
    return (x.float() * scale).clamp(-largest, largest).to(dtype).double() / scale.double()


@dataclass
class PlainLayer:
    """A linear layer in float8."""

    dtype: torch.dtype
    """Dtype in which the run holds what is cast."""
    delayed: bool
    cached: bool
    """Whether the weight is cast by its own magnitude, delayed or not."""
    num_shards: int = 1
    dim: int = 0
    """Dim of the weight that tensor-parallel ranks shard."""
    known: Sequence[float] = (0.0, 0.0, 0.0)
    """Largest magnitudes that the scales of `CASTS` are made from; 0 where a tensor's own counts."""
    largest: list[float] = field(default_factory=lambda: [0.0] * len(CASTS))
    """Largest magnitudes of the step."""

    def cast(self, x: Tensor, at: int, dtype: torch.dtype) -> Tensor:
        """Return what is cast of x, one of `CASTS`."""
        x = x.detach().to(self.dtype)
        if at == 1 and self.cached:
            return to_float8(x, dtype)
        self.largest[at] = max(self.largest[at], float(x.abs().max()))
        return to_float8(x, dtype, self.known[at])

    def product(self, x_td: Tensor, weight_ed: Tensor) -> Tensor:
        """Return x wᵀ, shard by shard."""
        weights = weight_ed.tensor_split(self.num_shards, self.dim)
        if self.dim == 0:
            return torch.cat([_Product.apply(x_td, weight, self) for weight in weights], -1)  # type: ignore[no-untyped-call]
        parts = zip(x_td.tensor_split(self.num_shards, -1), weights, strict=True)
        return sum((_Product.apply(*part, self) for part in parts), start=torch.zeros(()).to(x_td))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_td: Tensor, weight_ed: Tensor, layer: PlainLayer) -> Tensor:
        x, weight = layer.cast(x_td, 0, E4M3), layer.cast(weight_ed, 1, E4M3)
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return (x @ weight.T).to(x_td.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), dtype = ctx.saved_tensors, gradients[0].dtype
        gradient = ctx.layer.cast(gradients[0], 2, E5M2)
        return (gradient @ weight).to(dtype), (gradient.T @ x).to(dtype), None


class Float8Reference(InReference):
    """Casts of a plan's layers in the modules of a reference, at the scales that ranks recorded."""

    perturbation = 2.0**-14  # float32 moves so few elements to the next number that they are not the same ones twice

    def __init__(self, plan: RunPlan, evidence: Evidence) -> None:
        dtype, tp = getattr(torch, plan.edge.dtype), plan.mesh.size(*plan.mesh.view("tp"))
        self._evidence, self._placement = evidence, context_placement_of(plan)
        self._tokens_ct: Tensor | None = None
        self.layers: dict[str, PlainLayer] = {}
        self.magnitudes: dict[int, dict[str, list[float]]] = {}
        """Largest magnitudes of the reference in each step, by layer."""
        self.history = 0
        """Steps that delayed scales look back on."""
        for kind, layer in (pair for stage in plan.stages for pair in plan.held(stage)):
            if (part := kind.part(Float8Layers)) is None:
                continue
            dims = {p.name: shard.dim for p in kind.parameters for shard in p.used if "tp" in shard.axes}
            for path in part.layers:
                dim = dims.get(f"{path}.weight")
                shards = (1, 0) if dim is None else (tp, dim)
                self.layers[kind.full_name(path, layer)] = PlainLayer(dtype, part.history > 0, part.cached, *shards)
            self.history = max(self.history, part.history)

    @property
    def delayed(self) -> list[str]:
        """Names of the layers with delayed scales, in the order of their magnitudes."""
        return [name for name, layer in self.layers.items() if layer.delayed]

    def apply(self, model: nn.Module) -> None:
        """Let a model's layers cast."""
        for name, layer in self.layers.items():
            module: Any = model.get_submodule(name)
            module.forward = partial(self._forward, layer, module)
        if self._placement is not None:
            model.register_forward_pre_hook(self._note_tokens)

    def begin(self, step: int) -> None:
        """Start a step: give layers the magnitudes that the ranks' scales were made from."""
        known = self._recorded("known", step)[0].tolist()
        for number, name in enumerate(self.delayed):
            self.layers[name].known = known[number * len(CASTS) : (number + 1) * len(CASTS)]
        for layer in self.layers.values():
            layer.largest = [0.0] * len(CASTS)

    def end(self, step: int) -> None:
        """End a step: keep its largest magnitudes."""
        self.magnitudes[step] = {name: layer.largest for name, layer in self.layers.items()}

    def findings(self) -> Iterator[tuple[int, Diagnosis]]:
        """Yield the first step whose delayed scales are wrong."""
        evidence = self._evidence
        if not self.delayed:
            return
        steps = range(1, evidence.num_steps + 1)
        own, known = ([self._recorded(what, step) for step in steps] for what in ("own", "known"))
        applied = [not any(evidence.series("skipped", step)) for step in steps]
        for step in steps:
            due_s = [value for name in self.delayed for value in self.magnitudes[step][name]]
            before = [one for one, counts in zip(own[: step - 1], applied, strict=False) if counts]
            found = _wrong_scales(self.delayed, known[step - 1], before, self.history, evidence.axes)
            found = found or _lost(self.delayed, own[step - 1], due_s)
            if found is not None:
                yield step, found
                return

    def _recorded(self, what: str, step: int) -> Tensor:
        """Return magnitudes that ranks recorded, [rank, cast]; empty without delayed scales."""
        return torch.tensor([found["float8"].get(what, []) for found in self._evidence.series("features", step)])

    def _note_tokens(self, _: nn.Module, inputs: tuple[object, ...]) -> None:
        layout = next((one for one in inputs if isinstance(one, TokenLayout)), None)
        documents = None if layout is None else layout.documents
        assert self._placement is not None, "only layouts with cp have tokens by rank"
        shards = [shard_indices(shard) for shard in self._placement.shards(documents)]
        self._tokens_ct = torch.stack([one if one.dim() == 2 else one[None] for one in shards])

    def _forward(self, layer: PlainLayer, module: nn.Linear, x: Tensor) -> Tensor:
        out: Tensor
        tokens_cbt = self._tokens_ct
        if tokens_cbt is None or x.dim() != 3 or x.shape[1] != tokens_cbt[:, 0].numel():
            out = layer.product(x.flatten(0, -2), module.weight).view(*x.shape[:-1], -1)
        else:
            rows = torch.arange(len(x))[:, None]
            parts = [layer.product(x[rows, at_bt].flatten(0, 1), module.weight) for at_bt in tokens_cbt]
            whole = torch.cat([part.view(len(x), -1, part.shape[-1]) for part in parts], 1)
            order_bt = tokens_cbt.transpose(0, 1).flatten(1).argsort(-1)
            out = whole[rows, order_bt.expand(len(x), -1)]
        return out if module.bias is None else out + module.bias


APART = 1.25
"""Factor within which the largest magnitudes of inputs and weights are those of the reference: rounding changes single
elements. Those of gradients follow from what is wrong in a forward, and are only missed."""


def _lost(names: list[str], own_rs: Tensor, due_s: list[float]) -> Diagnosis | None:
    """Diagnose the magnitudes of a step that are not those of the reference."""
    own_s = own_rs.amax(0).tolist()
    for slot, (found, due) in enumerate(zip(own_s, due_s, strict=True)):
        cast = slot % len(CASTS)
        if not due or (found > 0 if cast == GRADIENTS else _near(found, due)):
            continue
        other = slot + 1 - 2 * cast if cast != GRADIENTS else slot  # inputs and weights are next to each other
        if other != slot and _near(found, due_s[other]) and _near(own_s[other], due):
            symptom = f"the largest magnitudes of inputs and weights of {names[slot // len(CASTS)]} are exchanged"
            return Diagnosis(FaultKind.MISPLACED, symptom, "delayed scales are those of the other tensor")
        symptom = f"the largest magnitude of the {_slot_words(names, slot)} is {found:.6g}, expected {due:.6g}"
        cause = "delayed scales are made from it" if found else "it is not recorded for the scales of later steps"
        return Diagnosis(FaultKind.OTHER_STEP, symptom, cause)
    return None


def _near(found: float, due: float) -> bool:
    return due / APART <= found <= due * APART


def _wrong_scales(
    names: list[str], known_rs: Tensor, before: list[Tensor], history: int, axes: Axes
) -> Diagnosis | None:
    """Diagnose scales that are not made from the largest magnitudes of all ranks in the steps before."""
    due_s = _known(before, history) if before else torch.zeros(known_rs.shape[1])
    is_wrong_rs = known_rs != due_s
    if not bool(is_wrong_rs.any()):
        return None
    ranks, slot = is_wrong_rs.any(1).nonzero()[:, 0].tolist(), int(is_wrong_rs.any(0).nonzero()[0])
    symptom = f"the {_slot_words(names, slot)} are scaled by another magnitude on {rank_words(ranks)}"
    detail = f"{known_rs[ranks[0], slot]:.6g}, expected {due_s[slot]:.6g}"
    return Diagnosis(FaultKind.OTHER_STEP, symptom, _scales_cause(known_rs, before, history, axes), detail)


def _slot_words(names: list[str], slot: int) -> str:
    return f"{CASTS[slot % len(CASTS)]} of {names[slot // len(CASTS)]}"


def _known(own: Sequence[Tensor], history: int) -> Tensor:
    """Return the largest magnitudes of all ranks in the last steps."""
    return torch.stack([one.amax(0) for one in own[-history:]]).amax(0)


def _scales_cause(known_rs: Tensor, own: list[Tensor], history: int, axes: Axes) -> str:
    """Return what the magnitudes that ranks scale by are made from instead."""
    if not own:
        return "scales are made from magnitudes of the step itself, which change from micro-batch to micro-batch"
    if not known_rs.any():
        return "the history is empty: the largest magnitudes of earlier steps are lost"
    due_s = _known(own, history)
    for a, b in combinations(range(len(CASTS)), 2):
        order = list(range(len(CASTS)))
        order[a], order[b] = b, a
        exchanged_s = due_s.view(-1, len(CASTS))[:, order].flatten()
        if bool(((known_rs == exchanged_s) | (known_rs == due_s)).all()):
            return f"the largest magnitudes of {CASTS[a]} and {CASTS[b]} are exchanged"
    for missing in [(axis,) for axis in axes.used()] + [tuple(axes.used())]:
        reduced = [_over_other_axes(one, missing, axes) for one in own[-history:]]
        if bool((known_rs == torch.stack(reduced).amax(0)).all()):
            return f"the largest magnitudes are not reduced over {join_words(list(missing))}"
    for number in range(1, len(own) + 1):
        if number != history and bool((known_rs == _known(own, number)).all()):
            return f"scales look back on {counted(number, 'step')}, not {history} (float8.amax_history)"
    if len(own) > 1 and bool((known_rs == _known(own[:-1], history)).all()):
        return "scales are one step late: the last step's magnitudes are not in the history"
    return "scales are not those of the largest magnitudes of the steps before"


def _over_other_axes(own_rs: Tensor, missing: tuple[str, ...], axes: Axes) -> Tensor:
    """Return each rank's maximum over the ranks that have its position on the missing axes."""
    places = [tuple(at[axis] for axis in missing) for at in coordinates(axes)]
    return torch.stack([own_rs[[other == place for other in places]].amax(0) for place in places])


REFERENCE = Float8Reference
