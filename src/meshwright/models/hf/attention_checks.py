"""Show that our attention is a model's own function, and that a rank needs no more of other tokens than their keys and
values.

On a small model in float64, our attention and the model's definition of its attention have the same logits and
gradients. Then shards of a sample, each with the keys and values that all tokens had, must have the logits of the whole
sample: convolutions, recurrences and positions that are counted instead of given don't.

Shapes: b batch, s queries, n heads, m key/value heads, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.contract.model_facts import AttentionFacts
from meshwright.models.foreign.origin import AttentionFound, ForeignModel
from meshwright.models.foreign.packing import MAX_TRIED, MIN_LENGTH, Float64Mode, float64_model, random_tokens
from meshwright.models.hf import private
from meshwright.models.hf.attention import STATE, Attending, Mixers, OtherMask, attending, register, set_cores
from meshwright.models.hf.config import OURS
from meshwright.nn.attention.attention import PLAIN, AttentionCore, LocalAttention, ScoreRules, attention
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.mask_spec import MaskSpec, Shard, TokenLayout
from meshwright.nn.attention.positions import shard_indices
from meshwright.units import counted

TOLERANCE = 1e-12
"""Difference of values and gradients, relative to the largest of a tensor."""


@dataclass
class _Recorder(AttentionCore):
    """Attention that computes nothing, and notes what it is asked for."""

    path: str
    calls: dict[str, list[AttentionFacts]]
    backend: str = "auto"

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> MaskSpec:
        """Return the rules."""
        return mask

    def __call__(self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: Any, scores: ScoreRules = PLAIN) -> Tensor:
        """Return an output of the right shape."""
        if not isinstance(mask, MaskSpec):
            raise OtherMask("its mask doesn't come from transformers' interface of masks")
        sinks, cap = scores.sinks_n is not None, scores.soft_cap is not None
        made = AttentionFacts("", mask, q_bsnh.shape[2], k_bsnh.shape[2], q_bsnh.shape[3], sinks=sinks, soft_cap=cap)
        self.calls.setdefault(self.path, []).append(made)
        return torch.zeros_like(q_bsnh)


def record_attention(model: nn.Module, forward: Callable[[], Any]) -> Mapping[str, list[AttentionFacts]]:
    """Return what attention is asked for in a forward of a model that is built with ours, on the meta device: call by
    call, by the path of the module that asks. Raises what the forward raises."""
    calls: dict[str, list[AttentionFacts]] = {}
    with _cores(model, lambda path: _Recorder(path, calls)), torch.no_grad():
        forward()
    return calls


@contextmanager
def _cores(model: nn.Module, core: Callable[[str], AttentionCore]) -> Iterator[None]:
    """Give a model's modules an attention for a while."""
    before = {module: vars(module).get("core") for module in model.modules()}
    state, masks = attending(model), core("")
    attend = Attending(lambda rules: (masks, None)) if state is None else state
    kept, attend.core_of = attend.core_of, lambda rules: (masks, None)
    set_cores(model, core, attend)
    try:
        yield
    finally:
        attend.core_of = kept
        for module, found in before.items():
            vars(module)["core"] = found
            if state is None and hasattr(getattr(module, "config", None), STATE):
                delattr(module.config, STATE)


@dataclass
class _Keeping(AttentionCore):
    """Attention that keeps the keys and values of whole samples, to which shards of them attend."""

    backend: str = "auto"
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    number: int = 0
    """Number of the shards' calls."""

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> tuple[AttentionMask, bool]:
        """Return the mask between a shard's queries and all keys, and whether there is a shard."""
        keys = (((0, layout.seq_len),),)
        exact = "reference"  # takes caps and sinks
        prepared = AttentionMask.at(mask, layout.seq_len, layout.shard, keys, device=device, backend=exact)
        return prepared, layout.shards is not None

    def __call__(self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: Any, scores: ScoreRules = PLAIN) -> Tensor:
        """Return the output [b, s, n, h]."""
        prepared, is_shard = mask
        if is_shard:
            k_bsnh, v_bsnh = self.kept[self.number % len(self.kept)]
            self.number += 1
        else:
            self.kept.append((k_bsnh, v_bsnh))
        return attention(q_bsnh, k_bsnh, v_bsnh, mask=prepared, scores=scores)


@dataclass
class _Run:
    """Outputs of a model's layers and logits, and the gradients of parameters by name."""

    layers: list[Tensor]
    logits: Tensor
    gradients: dict[str, Tensor]

    def first_difference(self, other: _Run, path: str) -> str:
        """Return what differs first in another run, or an empty string."""
        for number, (one, two) in enumerate(zip(self.layers, other.layers, strict=True)):
            if not _close(one, two):
                return f"the output of {path}.{number}"
        if not _close(self.logits, other.logits):
            return "logits"
        differing = (n for n, one in self.gradients.items() if not _close(one, other.gradients[n]))
        return next((f"the gradient of {name}" for name in differing), "")


def _close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= TOLERANCE * max(1.0, float(one.abs().max()))


def _run(
    origin: ForeignModel, model: nn.Module, ids_bt: Tensor, layout: TokenLayout | None, *, gradients: bool = False
) -> _Run:
    """Run a model on the tokens of a layout; without one, by its definition."""
    outputs: list[Tensor] = []
    layers = model.get_submodule(origin.layers_path(model))
    handles = [
        layer.register_forward_hook(lambda m, args, out: outputs.append(out if isinstance(out, Tensor) else out[0]))
        for layer in layers.children()
    ]
    try:
        with Float64Mode(), torch.set_grad_enabled(gradients):
            logits = origin.call(model, ids_bt, layout)
            if gradients:
                torch.autograd.backward(logits.sin().sum())
    finally:
        for handle in handles:
            handle.remove()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and gradients}
    return _Run([one.detach() for one in outputs], logits.detach(), found)


@dataclass(frozen=True)
class Small:
    """A model with tiny sizes, whose limits are to `MAX_TRIED` tokens as its own are to those of a sample."""

    defined: ForeignModel
    """The model with its definition of attention."""
    ours: Callable[[int], ForeignModel]
    """Return the model with our attention, given the position of a sample's first token."""


def find_attention(origin: ForeignModel, model: nn.Module, small: Small, seq_len: int) -> AttentionFound:
    """Return the attention of the layers of a model, which is built, and what it allows for samples of a length."""
    ids, path = torch.zeros((1, seq_len), dtype=torch.long, device=next(model.parameters()).device), ""
    try:
        register()
        with private.attention(model, OURS):
            calls = record_attention(model, lambda: origin.call(model, ids, TokenLayout(seq_len)))
        path = origin.layers_path(model)
    except Exception as error:  # whatever a model raises
        return _refused_by(error)
    if not calls:
        why = "it doesn't attend through transformers' interface of attention"
        return AttentionFound(not_ours=why, not_context=why)
    layers, why = dict[int, AttentionFacts](), ""
    for index, _ in enumerate(model.get_submodule(path).children()):
        prefix = f"{path}.{index}."
        own = [
            (name.removeprefix(prefix), one)
            for name, found in calls.items()
            for one in found
            if name.startswith(prefix)
        ]
        if own:
            layers[index] = replace(own[0][1], module=own[0][0])
        if len(own) != 1:
            number = f"{counted(len(own), 'call')} of transformers' interface of attention"
            why = why or f"{path}.{index} has {number}, not one"
    found = _try_ours(small, length=min(seq_len, MAX_TRIED))
    return replace(found, layers=layers, not_context=why or found.not_context)


FIRST_POSITIONS = (0, 1, 2)
"""Positions of a sample's first token that are tried; some models count from behind the id of padding."""


def _try_ours(small: Small, *, length: int) -> AttentionFound:
    """Return whether our attention is that of a small model, and shards of a sample do with keys and values of the
    other tokens."""
    length = max(length, MIN_LENGTH) // 4 * 4
    ids_bt, ours = random_tokens(length), small.ours(0)
    whole = TokenLayout(length)
    try:
        expected = _run(small.defined, float64_model(small.defined), ids_bt, None, gradients=True)
        model = float64_model(ours)
        path = ours.layers_path(model)
        if different := expected.first_difference(_run(ours, model, ids_bt, whole, gradients=True), path):
            why = f"{different} isn't that of its own attention"
            return AttentionFound(not_ours=why, not_context=why)
    except Exception as error:  # whatever a model raises
        return _refused_by(error)
    reasons = [_why_not_sharded(small.ours(first), model, ids_bt, expected) for first in FIRST_POSITIONS]
    if "" in reasons:
        return AttentionFound(first_position=reasons.index(""))
    return AttentionFound(not_context=reasons[0], mixers=_find_mixers(ours, model, ids_bt))


def _refused_by(error: Exception) -> AttentionFound:
    why = f"it can't run with another attention ({type(error).__name__}: {str(error)[:100]})"
    if MaskSpec.__name__ in why:
        why = "its layers compute with masks themselves, as sparse attention does"
    return AttentionFound(not_ours=why, not_context=why)


def _why_not_sharded(origin: ForeignModel, model: nn.Module, ids_bt: Tensor, expected: _Run) -> str:
    """Return what differs in a shard of the tokens that gets the keys and values of all."""
    length, path = ids_bt.shape[1], origin.layers_path(model)
    quarter = length // 4
    shards: tuple[Shard, ...] = ((((0, quarter), (3 * quarter, length)),), (((quarter, 3 * quarter),),))
    core = _Keeping()
    with _cores(model, lambda _: core):
        whole = replace(_run(origin, model, ids_bt, TokenLayout(length)), gradients=expected.gradients)
        if expected.first_difference(whole, path):
            return "positions are counted otherwise than from the first token"
        for rank, shard in enumerate(shards):
            index = shard_indices(shard)
            try:
                found = _run(origin, model, ids_bt[:, index], TokenLayout(length).on(shards, rank))
            except Exception as error:
                return f"its forward doesn't take some of the tokens ({type(error).__name__}: {str(error)[:100]})"
            layers, nothing = [_tokens(one, index, length) for one in whole.layers], dict[str, Tensor]()
            if different := _Run(layers, whole.logits[:, index], nothing).first_difference(found, path):
                return f"{different} depends on other tokens by more than their keys and values"
    return ""


def _tokens(x: Tensor, index: Tensor, length: int) -> Tensor:
    """Return some tokens of a layer's output, whichever dim they are."""
    return x.index_select(next(dim for dim, size in enumerate(x.shape) if size == length), index)


@dataclass(frozen=True)
class _Noting(LocalAttention):
    """Attention that notes which module asks for it."""

    backend: str = "reference"
    path: str = ""
    paths: set[str] = field(default_factory=set)

    def __call__(self, q_bsnh: Tensor, k_bsnh: Tensor, v_bsnh: Tensor, mask: Any, scores: ScoreRules = PLAIN) -> Tensor:
        """Return the output [b, s, n, h]."""
        self.paths.add(self.path)
        return super().__call__(q_bsnh, k_bsnh, v_bsnh, mask, scores)


Values = dict[str, tuple[list[Tensor], list[Tensor]]]
"""Inputs and outputs of modules for the second document, by path."""


def _find_mixers(origin: ForeignModel, model: nn.Module, ids_bt: Tensor) -> Mixers:
    """Return the outermost modules of layers, without attention inside, whose output for a document depends on the
    document before it."""
    length, path, attend = ids_bt.shape[1], origin.layers_path(model), set[str]()
    start = length // 2 + 1
    layout = TokenLayout(length, documents=((start, length - start),) * len(ids_bt))
    changed = ids_bt.clone()
    changed[:, :start] = 34 - changed[:, :start]  # in the same range
    runs: list[Values] = [{}, {}]
    with _cores(model, lambda path: _Noting(path=path, paths=attend)):
        for ids, seen in zip((ids_bt, changed), runs, strict=True):
            handles = [
                module.register_forward_hook(partial(_note, seen, name, start, length), with_kwargs=True)
                for name, module in model.named_modules()
            ]
            try:
                _run(origin, model, ids, layout)
            except Exception:  # such as a forward without positions
                return ()
            finally:
                for handle in handles:
                    handle.remove()
    layers = model.get_submodule(path).named_children()
    found = (one for number, layer in layers for one in _leaking(layer, f"{path}.{number}", "", runs, attend))
    return tuple(dict.fromkeys(found))


def _note(
    seen: Values, name: str, start: int, length: int, module: nn.Module, args: Any, kwargs: Mapping[str, Any], out: Any
) -> None:
    def second(values: Any) -> list[Tensor]:
        tensors = (x for x in values if isinstance(x, Tensor) and x.is_floating_point())
        return [x[:, start:].detach() for x in tensors if x.dim() > 1 and x.shape[1] == length]

    outputs = second(out if isinstance(out, tuple | list) else [out])
    seen.setdefault(name, (second([*args, *kwargs.values()]), outputs))


def _leaking(
    module: nn.Module, path: str, inside: str, runs: list[Values], attend: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield path in the layer and class of the modules in which one document reaches another."""
    for name, child in module.named_children():
        full, inner = f"{path}.{name}", f"{inside}.{name}".removeprefix(".")
        one, other = (run.get(full) for run in runs)
        if one is None or other is None or any(at == full or at.startswith(f"{full}.") for at in attend):
            yield from _leaking(child, full, inner, runs, attend)
        elif all(map(torch.equal, one[0], other[0])) and not all(map(_close, one[1], other[1])):
            yield inner, type(child).__name__
