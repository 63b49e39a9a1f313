"""Attention of transformers' models by ours, through their interfaces of masks and of attention.

A model asks the one for the mask of each kind of layer, once before its layers, and hands what it gets through them to
the other. So our prepared masks travel as the model's own do, into recomputed and compiled layers, too, and a layer's
attention is its attribute `core`, which context parallelism replaces. The rules of a mask are read off the model's own
function of a query and a key.

Shapes: b batch, s queries, t keys, n heads, m key/value heads, h head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.contract.model_facts import AttentionFacts
from meshwright.models.foreign.by_document import run_by_document
from meshwright.models.foreign.origin import POSITIONS
from meshwright.models.hf.config import OURS
from meshwright.nn.attention.attention import AttentionCore, LocalAttention, ScoreRules
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout

STATE = "meshwright_attention"
"""Attribute of a model's configuration, by which masks find what they are made for."""


class OtherMask(Exception):
    """A mask has other rules than a `MaskSpec`."""


@dataclass
class Attending:
    """State by which a model's masks are made: the attention of its layers, and the tokens of a micro-batch."""

    core_of: Callable[[MaskSpec], tuple[AttentionCore, AttentionRequest | None] | None]
    """Returns the attention of the layers with such a mask, and what it asks of a backend; None without such layers."""
    layout: TokenLayout | None = None
    positions: Tensor | None = None
    """Positions [b, t] of the micro-batch's tokens; None if they are those of whole samples."""

    def mask(self, visible: Callable[..., Tensor], num_queries: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the prepared mask of a micro-batch, given the model's function of what is visible."""
        layout = self.layout or TokenLayout(num_queries)
        rules = rules_of(visible, layout.seq_len)
        found = self.core_of(rules)
        if found is None:
            return None
        core, request = found
        request = request and replace(request, device=device.type, dtype=str(dtype).removeprefix("torch."))
        return core.prepare(replace(rules, documents=layout.documents), layout, device, request)


def rules_of(visible: Callable[..., Tensor], length: int) -> MaskSpec:
    """Return the rules of a function of batch, head, query and key, for samples of `length` tokens, or raise
    OtherMask."""
    with torch.device("cpu"):
        zero, keys = torch.zeros((), dtype=torch.long), torch.arange(length)
        rows = {
            query: visible(zero, zero, torch.tensor(query), keys).expand(length)
            for query in (0, length // 2, length - 1)
        }
    hidden = int((~rows[length - 1]).sum())
    rules = MaskSpec(causal=not bool(rows[0][1:].any()), window=length - hidden if hidden else None)
    for query, row in rows.items():
        first, last = rules.visible(query, length)
        if not torch.equal(row, (keys >= first) & (keys < last)):
            raise OtherMask("a mask is neither causal nor a window")
    return rules


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the output [b, s, n, h] for queries, keys and values [b, n, s, h]; values of another width than keys are
    padded, as kernels and exchanges take them."""
    width, scale = value.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    widest = max(query.shape[-1], width)
    q_bsnh, k_btmh, v_btmh = (F.pad(x.transpose(1, 2), (0, widest - x.shape[-1])) for x in (query, key, value))
    core: AttentionCore = module.core  # type: ignore[assignment]
    out = core(q_bsnh, k_btmh, v_btmh, attention_mask, ScoreRules(scale, softcap, s_aux))
    return out[..., :width].contiguous(), None


def make_mask(
    *, q_length: int, mask_function: Any, config: Any, dtype: torch.dtype, device: torch.device, **others: Any
) -> Any:
    """Return the mask of a kind of layers, as our attention takes it."""
    return getattr(config, STATE).mask(mask_function, q_length, torch.device(device), dtype)


def register() -> None:
    """Register our attention with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(OURS, attend)
    AttentionMaskInterface.register(OURS, make_mask)


def attending(model: Any) -> Attending | None:
    """Return what the masks of a model, or of a model's forward, are made for; None if they aren't ours."""
    found: Attending | None = getattr(getattr(getattr(model, "__self__", model), "config", None), STATE, None)
    return found


def set_cores(model: nn.Module, core: Callable[[str], AttentionCore], state: Attending) -> None:
    """Give every module of a model an attention by its path: which of them attend, only a forward shows."""
    for path, module in model.named_modules():
        vars(module)["core"] = core(path)
        if "config" in vars(module):
            setattr(module.config, STATE, state)


def attend_by_ours(model: nn.Module) -> None:
    """Let a model that was built with our attention attend to the tokens that it is given, by the reference, which
    takes all rules of scores, unless masks are prepared for another backend."""
    local, reference = LocalAttention(), LocalAttention("reference")
    state = Attending(lambda rules: (reference, None))
    set_cores(model, lambda path: local, state)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and POSITIONS in inspect.signature(type(module).forward).parameters:
            module.forward = partial(_with_positions, module.forward, state)  # type: ignore[method-assign]


def _with_positions(forward: Callable[..., Tensor], state: Attending, *args: Any, **kwargs: Any) -> Tensor:
    """Return the rows of a table of positions [b, t, d] for all samples at once, whatever the model counts itself."""
    taken, positions = inspect.signature(forward).bind_partial(*args, **kwargs), state.positions
    given = taken.arguments.get(POSITIONS)
    if positions is None or (given is not None and given.dim() == positions.dim()):
        return forward(*args, **kwargs)
    taken.arguments[POSITIONS] = positions.flatten()
    return forward(*taken.args, **taken.kwargs).view(*positions.shape, -1)


Mixers = tuple[tuple[str, str], ...]
"""Modules that mix tokens without attention: their path in a layer, and their class, since a path may hold several."""


def run_mixers_by_document(model: nn.Module, layers_path: str, layers: Iterable[int], mixers: Mixers) -> None:
    """Let the modules of layers that mix tokens without attention run document by document."""
    state = attending(model)
    assert state is not None, "the model is built with our attention"
    for index in layers:
        layer = model.get_submodule(f"{layers_path}.{index}")
        classes = {path: type(module).__name__ for path, module in layer.named_modules()}
        if paths := [path for path, name in mixers if classes.get(path) == name]:
            run_by_document(layer, paths, lambda: state.layout)


def attend_on_stage(model: nn.Module, layers: Mapping[str, AttentionFacts]) -> None:
    """Let the layers of a stage attend by what may be replaced, given their paths and what they describe."""
    owners: dict[MaskSpec, nn.Module] = {}
    requests: dict[MaskSpec, AttentionRequest] = {}
    for path, facts in layers.items():
        module = model.get_submodule(f"{path}.{facts.module}")
        vars(module)["mask"] = facts.mask
        owners.setdefault(facts.mask, module)
        before = requests.get(facts.mask)
        request = AttentionRequest(
            "cpu", "float32", num_heads=facts.num_heads, num_kv_heads=facts.num_kv_heads, head_dim=facts.head_dim,
            needs_lse=facts.sinks, soft_cap=facts.soft_cap,
        )  # fmt: skip
        requests[facts.mask] = request if before is None else _both(before, request)

    def core_of(rules: MaskSpec) -> tuple[AttentionCore, AttentionRequest | None] | None:
        # Samples of another length, as in generation, may have other rules.
        known = rules if rules in owners else next(iter(owners), None)
        return None if known is None else (owners[known].core, requests[known])  # type: ignore[return-value]

    state = attending(model)
    assert state is not None, "the model is built with our attention"
    state.core_of = core_of


def _both(one: AttentionRequest, other: AttentionRequest) -> AttentionRequest:
    widest = max(one.head_dim, other.head_dim)
    lse, cap = one.needs_lse or other.needs_lse, one.soft_cap or other.soft_cap
    return replace(one, head_dim=widest, needs_lse=lse, soft_cap=cap)
