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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshwright.models.contract.model_facts import AttentionFacts
from meshwright.models.foreign.origin import AttentionFound, ForeignModel
from meshwright.models.foreign.packing import MAX_TRIED, MIN_LENGTH, Float64Mode, small_model, tokens_of
from meshwright.models.hf import private
from meshwright.models.hf.attention import STATE, Attending, OtherMask, register, set_cores
from meshwright.models.hf.config import OURS
from meshwright.nn.attention.attention import PLAIN, AttentionCore, ScoreRules, attention
from meshwright.nn.attention.attention_mask import AttentionMask
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.mask_spec import MaskSpec, Shard, TokenLayout
from meshwright.nn.attention.positions import shard_indices
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.models.hf.origin import TransformersModel

TOLERANCE = 1e-12
"""Of values and gradients, relative to the largest of a tensor."""


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
    states = {id(m.config): (m.config, getattr(m.config, STATE, None)) for m in model.modules() if "config" in vars(m)}
    masks = core("")
    set_cores(model, core, Attending(lambda rules: (masks, None)))
    try:
        yield
    finally:
        for module, found in before.items():
            vars(module)["core"] = found
        for config, state in states.values():
            setattr(config, STATE, state)


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


def _run(origin: ForeignModel, model: nn.Module, ids_bt: Tensor, layout: TokenLayout | None = None) -> _Run:
    """Run a model on whole samples, with gradients, or on shards."""
    is_whole = layout is None or layout.shards is None
    outputs: list[Tensor] = []
    layers = model.get_submodule(origin.layers_path(model))
    handles = [
        layer.register_forward_hook(lambda m, args, out: outputs.append(out if isinstance(out, Tensor) else out[0]))
        for layer in layers.children()
    ]
    try:
        with Float64Mode(), torch.set_grad_enabled(is_whole):
            logits = origin.call(model, ids_bt, layout)
            if is_whole:
                torch.autograd.backward(logits.sin().sum())
    finally:
        for handle in handles:
            handle.remove()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return _Run([one.detach() for one in outputs], logits.detach(), gradients)


def find_attention(
    origin: TransformersModel, model: nn.Module, small: TransformersModel, seq_len: int
) -> AttentionFound:
    """Return the attention of a model's layers, and what it allows.

    Args:
        origin: the model.
        model: the model, built.
        small: the model with tiny sizes, whose limits are to `MAX_TRIED` tokens as its own are to `seq_len`.
        seq_len: tokens of a sample.
    """
    ids, path = torch.zeros((1, seq_len), dtype=torch.long, device=next(model.parameters()).device), ""
    try:
        register()
        with private.attention(model, OURS):
            calls = record_attention(model, lambda: origin.call(model, ids, TokenLayout(seq_len)))
        path = origin.layers_path(model)
    except Exception as error:  # whatever a model raises
        why = f"it can't run with another attention ({type(error).__name__}: {str(error)[:100]})"
        return AttentionFound(not_ours=why, not_context=why)
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
    not_ours, not_context = why_not_ours(replace(small, attention_name="eager"), small, length=min(seq_len, MAX_TRIED))
    return AttentionFound(layers, not_ours, why or not_context)


def why_not_ours(defined: ForeignModel, small: TransformersModel, *, length: int) -> tuple[str, str]:
    """Return why our attention isn't that of a small model, and why shards of a sample don't do with keys and values of
    the other tokens; empty strings if it is, and they do."""
    length = max(length, MIN_LENGTH) // 4 * 4
    ids_bt, ours = tokens_of(length), replace(small, attention_name=OURS)
    whole = TokenLayout(length)
    try:
        expected = _run(defined, small_model(defined), ids_bt)
        model = small_model(ours)
        path = ours.layers_path(model)
        if different := expected.first_difference(_run(ours, model, ids_bt, whole), path):
            why = f"{different} isn't that of its own attention"
            return why, why
    except Exception as error:  # whatever a model raises
        why = f"it can't run with another attention ({type(error).__name__}: {str(error)[:100]})"
        return why, why
    try:
        return "", _why_not_sharded(ours, model, ids_bt)
    except Exception as error:
        return "", f"its forward doesn't take some of the tokens ({type(error).__name__}: {str(error)[:100]})"


def _why_not_sharded(origin: ForeignModel, model: nn.Module, ids_bt: Tensor) -> str:
    """Return what differs in a shard of the tokens that gets the keys and values of all."""
    length, path = ids_bt.shape[1], origin.layers_path(model)
    quarter = length // 4
    shards: tuple[Shard, ...] = ((((0, quarter), (3 * quarter, length)),), (((quarter, 3 * quarter),),))
    core = _Keeping()
    with _cores(model, lambda _: core):
        whole = _run(origin, model, ids_bt, TokenLayout(length))
        for rank, shard in enumerate(shards):
            index = shard_indices(shard)
            found = _run(origin, model, ids_bt[:, index], TokenLayout(length).on(shards, rank))
            expected = _Run(
                [_tokens(one, index, length) for one in whole.layers], whole.logits[:, index], dict[str, Tensor]()
            )
            if different := expected.first_difference(found, path):
                return f"{different} depends on other tokens by more than their keys and values"
    return ""


def _tokens(x: Tensor, index: Tensor, length: int) -> Tensor:
    """Return some tokens of a layer's output, whichever dim they are."""
    return x.index_select(next(dim for dim, size in enumerate(x.shape) if size == length), index)
