"""Definitions of what the reference would otherwise share with the layout under proof: attention by dense masks made
document by document, rotary embedding by complex numbers, routing by sorting, experts one after the other, dropout by
its mask.

A fault in a shared module is in both sides of a comparison, and can't be seen by it. So the reference's modules compute
by these, which are written for reading.

Shapes: b samples, q queries, k keys, t tokens, n heads, m key/value heads, h head_dim, d model width, e experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.attention.attention import PLAIN, AttentionCore, ScoreRules
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.mask_spec import Documents, MaskSpec, TokenLayout
from meshwright.nn.attention.positions import RotaryEmbedding
from meshwright.nn.dropout_add.eager import drop_threshold, keep_mask, keep_scale
from meshwright.nn.dropout_add.module import DropoutAdd
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router import Router
from meshwright.nn.experts.router_config import Score
from meshwright.nn.transformer_block import Attention, TokenContext

MAX_SCORES = 1 << 27
"""Most scores of a forward that are held at once; longer samples are computed by the shared attention."""


def visible_pairs(spec: MaskSpec, lengths: tuple[int, ...]) -> Tensor:
    """Return which keys [q, k] each query of a sample sees, given the lengths of its documents."""
    blocks = []
    for length in lengths:
        query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
        seen = torch.ones(length, length, dtype=torch.bool)
        if spec.causal:
            seen &= (key <= query) | (key < spec.prefix)
        if spec.window is not None:
            seen &= (query - key).abs() < spec.window
        blocks.append(seen)
    whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return whole.bool()


def positions(documents: Documents | None, seq_len: int) -> Tensor:
    """Return the positions of tokens in their documents, [t] or [b, t]."""
    if documents is None:
        return torch.arange(seq_len)
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in documents])


def _own_tokens(layout: TokenLayout) -> Tensor:
    """Return the tokens of a layout that are there: all, or those of a document that is computed alone."""
    return torch.cat([torch.arange(start, stop) for start, stop in layout.shard[0]])


def plain_attention(
    q_bqnh: Tensor, k_bkmh: Tensor, v_bkmh: Tensor, seen_bqk: Tensor, scale: float, scores: ScoreRules = PLAIN
) -> Tensor:
    """Return softmax(scale · q kᵀ) v over the keys that are seen (Vaswani et al. 2017, equation 1), [b, q, n, h]; zeros
    for a query that sees none.

    Sums are at least in float32. As in kernels, whose products take numbers of the inputs' dtype, weights are rounded
    to it.
    """
    dtype, group = q_bqnh.dtype, q_bqnh.shape[2] // k_bkmh.shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    k_bknh, v_bknh = (x.to(wide).repeat_interleave(group, dim=2) for x in (k_bkmh, v_bkmh))
    scores_bnqk = scale * torch.einsum("bqnh,bknh->bnqk", q_bqnh.to(wide), k_bknh)
    if scores.soft_cap is not None:
        scores_bnqk = scores.soft_cap * torch.tanh(scores_bnqk / scores.soft_cap)
    scores_bnqk = scores_bnqk.masked_fill(~seen_bqk[:, None], -math.inf)
    if scores.sinks_n is not None:  # a key without a value
        sinks_bnq1 = scores.sinks_n.to(wide)[:, None, None].expand_as(scores_bnqk[..., :1])
        scores_bnqk = torch.cat((scores_bnqk, sinks_bnq1), -1)
    weights_bnqk = scores_bnqk.softmax(-1).nan_to_num(0.0)[..., : k_bkmh.shape[1]]
    return torch.einsum("bnqk,bknh->bqnh", weights_bnqk.to(dtype).to(wide), v_bknh).to(dtype)


def rotate(x_btnh: Tensor, turns_th: Tensor) -> Tensor:
    """Multiply each pair (x[i], x[i + h/2]) as a complex number by turns […, t, h/2] (Su et al. 2021, equation 13)."""
    real, imaginary = x_btnh.chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * turns_th.unsqueeze(-2)
    return torch.cat((turned.real, turned.imag), dim=-1)


@dataclass(frozen=True)
class PlainAttention(AttentionCore):
    """Attention by its definition; by another core where samples are long."""

    other: Any
    backend: str = "auto"

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> Any:
        """Return which keys each query sees, [b, q, k], and what the other core takes."""
        documents = ((layout.seq_len,),) if mask.documents is None else mask.documents
        own = self.other.prepare(mask, layout, device, request)
        if len(documents) * layout.seq_len**2 > MAX_SCORES:
            return None, own
        own_t = _own_tokens(layout)
        return torch.stack([visible_pairs(mask, lengths)[own_t][:, own_t] for lengths in documents]).to(device), own

    def __call__(self, q_bqnh: Tensor, k_bkmh: Tensor, v_bkmh: Tensor, mask: Any, scores: ScoreRules = PLAIN) -> Tensor:
        """Return the output [b, q, n, h]."""
        seen_bqk, own = mask
        size, length, heads = q_bqnh.shape[:3]
        if seen_bqk is None or size * heads * length**2 > MAX_SCORES:
            out: Tensor = self.other(q_bqnh, k_bkmh, v_bkmh, own, scores)
            return out
        scale = q_bqnh.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        return plain_attention(q_bqnh, k_bkmh, v_bkmh, seen_bqk.expand(size, -1, -1), scale, scores)


@dataclass(frozen=True)
class PlainRotary(RotaryEmbedding):
    """Rotary embedding by complex numbers."""

    def tables(self, layout: TokenLayout, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return real and imaginary parts of exp(i · position · frequency), each [t, h/2] or [b, t, h/2]."""
        if dtype != torch.float64:
            return super().tables(layout, device=device, dtype=dtype)
        frequencies = [self._frequency(pair) for pair in range(self.head_dim // 2)]
        places = positions(layout.documents, layout.seq_len)[..., _own_tokens(layout)]
        angles = places[..., None] * torch.tensor(frequencies, dtype=dtype)
        turns = torch.polar(torch.ones_like(angles), angles)
        return turns.real.to(device), turns.imag.to(device)

    def _frequency(self, pair: int) -> float:
        """Return the angle per position of a pair; scaled as by Grattafiori et al. 2024, section 3.4."""
        frequency: float = self.theta ** (-2 * pair / self.head_dim)
        if (scaling := self.scaling) is None:
            return frequency
        turns = scaling.original_seq_len * frequency / (2 * math.pi)
        share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(1.0, max(0.0, share))
        return frequency * kept + frequency / scaling.factor * (1 - kept)


def use_definitions(model: nn.Module) -> None:
    """Let a plain model, which holds all tokens and experts, compute by the definitions."""
    for module in model.modules():
        for name, value in dict(vars(module)).items():
            if type(value) is RotaryEmbedding:
                setattr(module, name, PlainRotary(value.head_dim, value.theta, value.scaling))
        if type(module) is Attention:
            module.core = PlainAttention(module.core)
            module.forward = partial(_attention, module)  # type: ignore[method-assign]
        elif isinstance(vars(module).get("core"), AttentionCore):  # of a foreign model
            vars(module)["core"] = PlainAttention(module.core)
        elif type(module) is MixtureOfExperts:
            module.forward = partial(_experts, module)  # type: ignore[method-assign]
            if type(module.router) is Router:
                module.router.best = partial(best_experts, module.router)  # type: ignore[method-assign]
        elif type(module) is DropoutAdd:
            module.forward = partial(_dropout_add, module)  # type: ignore[method-assign]


def _dropout_add(layer: DropoutAdd, x_btd: Tensor, residual_btd: Tensor, rows_bt: Tensor | None = None) -> Tensor:
    """Return residual + x / (1 - p) where x is kept, else the residual (Srivastava et al. 2014, section 10)."""
    if not layer.training or rows_bt is None:
        return residual_btd + x_btd
    dtype = torch.promote_types(x_btd.dtype, residual_btd.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    kept_btd = keep_mask(layer.key, rows_bt, x_btd.shape[-1], layer.p)
    scaled_btd = x_btd.to(wide) * keep_scale(drop_threshold(layer.p))
    return (residual_btd.to(wide) + scaled_btd.masked_fill(~kept_btd, 0.0)).to(dtype)


def _attention(layer: Attention, x_btd: Tensor, tokens: TokenContext) -> Tensor:
    q, k, v = (w(x_btd).unflatten(-1, (-1, layer.head_dim)) for w in (layer.wq, layer.wk, layer.wv))
    if tokens.cos is not None and tokens.sin is not None:
        turns = torch.complex(tokens.cos, tokens.sin).to(torch.complex128)
        q, k = (rotate(x.double(), turns).to(x.dtype) for x in (q, k))
    out: Tensor = layer.wo(layer.core(q, k, v, tokens.mask).flatten(2))
    return out


def _experts(layer: MixtureOfExperts, x_btd: Tensor) -> Tensor:
    """Add up each token's experts, times their routing weights (Shazeer et al. 2017, equation 2)."""
    routing, x_nd = layer.router(x_btd), x_btd.flatten(0, 1)
    out_nd = torch.zeros_like(x_nd, dtype=torch.promote_types(x_nd.dtype, torch.float32))
    for expert in range(layer.router.config.num_experts):
        chosen_nk = routing.experts_nk == expert
        token = chosen_nk.any(-1).nonzero()[:, 0]
        weight = (routing.weights_nk * chosen_nk).sum(-1)[token]
        out = one_expert(layer, expert, x_nd[token]) * weight[:, None].to(out_nd.dtype)
        out_nd = out_nd.index_add(0, token, out.to(out_nd.dtype))
    out_btd = out_nd.to(x_btd.dtype).view_as(x_btd)
    return out_btd if layer.shared is None else out_btd + layer.shared(x_btd)


def one_expert(layer: MixtureOfExperts, expert: int, x_nd: Tensor, *, exchanged: bool = False) -> Tensor:
    """Return down(silu(gate(x)) · up(x)) of an expert (Shazeer 2020, equation 6), or with gate and up exchanged."""
    gate, up, down = (weight[expert] for weight in (layer.experts.gate, layer.experts.up, layer.experts.down))
    gate, up = (up, gate) if exchanged else (gate, up)
    return (F.silu(x_nd @ gate.T) * (x_nd @ up.T)) @ down.T


def scores(router: Router, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return experts' scores, and the probabilities of the balance loss: the same after a softmax; after a sigmoid
    (DeepSeek-AI 2024, "DeepSeek-V3", equations 15 and 18) divided by their sum."""
    found = logits.softmax(-1) if router.config.score is Score.SOFTMAX else 1 / (1 + (-logits).exp())
    return found, found / found.sum(-1, keepdim=True)


def best_experts(router: Router, scores_bte: Tensor, *, of_group: int = 2) -> Tensor:
    """Return the experts with the best scores of each token, within the groups whose best `of_group` experts have the
    highest sums, [b, t, k]."""
    config = router.config
    if router.load.bias is not None:
        scores_bte = scores_bte + router.load.bias
    if config.num_groups > 1:
        groups = scores_bte.view(*scores_bte.shape[:2], config.num_groups, -1)
        top = groups.sort(dim=-1, descending=True).values[..., :of_group].sum(-1)
        rank_btg = top.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        scores_bte = groups.masked_fill((rank_btg >= config.top_groups)[..., None], -math.inf).flatten(-2)
    return scores_bte.argsort(dim=-1, descending=True, stable=True)[..., : config.top_k]
