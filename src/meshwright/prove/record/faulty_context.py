"""Faults of context parallelism, done to the reference on full samples in one process.

Each says what is read, where tokens are believed to be, which keys are seen, or which gradients are returned, as a
function of the ranks that would hold the tokens.

Shapes: b samples, or 1 if all are alike; t tokens, q queries, k keys; n heads, m key heads, g queries of a key head, h
head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from meshwright.nn.attention.attention import AttentionCore
from meshwright.nn.attention.attention_mask import key_bounds
from meshwright.nn.attention.backend import AttentionRequest
from meshwright.nn.attention.mask_spec import MaskSpec, TokenLayout
from meshwright.nn.attention.positions import RotaryEmbedding, rope_tables
from meshwright.nn.transformer_block import Attention
from meshwright.prove.record.token_table import TokenTable

TokenIndex = Callable[[TokenTable], Tensor]
"""Return an index [b, t] for each token."""


@dataclass(frozen=True, eq=False)
class MaskOfSamples:
    """What a faulty mask is made of."""

    spec: MaskSpec
    seq_len: int
    table: TokenTable

    def visible_bqk(self, **changes: object) -> Tensor:
        """Return the dense mask, with other rules."""
        everything, spec = (((0, self.seq_len),),), replace(self.spec, **changes)  # type: ignore[arg-type]
        return key_bounds(spec, self.seq_len, everything, everything).visible()

    def same_document_bqk(self) -> Tensor:
        """Return the pairs of tokens in the same document."""
        return self.table.is_same_document_bqk()

    def received_bqk(self) -> Tensor:
        """Return the keys that a query's rank has: its own, and those that any of its queries may attend to."""
        visible, own = self.visible_bqk(), self.table.is_shared_bqk()
        return own | (own.float() @ visible.float()).bool()

    def visible_at(self, index_bt: Tensor) -> Tensor:
        """Return the dense mask between tokens that are believed to be at other indices."""
        visible = self.visible_bqk()
        visible = visible.expand(max(len(visible), len(index_bt)), -1, -1)
        index_bt = index_bt.expand(len(visible), -1)
        sample = torch.arange(len(visible))[:, None, None]
        return visible[sample, index_bt[:, :, None], index_bt[:, None, :]]


@dataclass(frozen=True)
class ContextFault:
    """A fault of context parallelism; what is None is right."""

    inputs: TokenIndex | None = None
    """Token that is read as the input of each."""
    targets: TokenIndex | None = None
    """Token whose target is read as the target of each."""
    positions: TokenIndex | None = None
    """Position for RoPE."""
    mask: Callable[[MaskOfSamples], Tensor] | None = None
    """Return the keys [b, q, k] that each query sees."""
    key_gradient: float = 1.0
    """Factor of the gradients of keys that queries on other ranks see."""
    value_gradient: float = 1.0
    """Factor of the gradients of values, likewise."""
    rank: int | None = None
    """The only rank with the fault: the owner of tokens, queries, or keys and values whose gradient is wrong; None for
    all ranks."""

    def index(self, name: str, table: TokenTable, right_bt: Tensor) -> Tensor:
        """Return an index of the fault by its name, where the fault is, and `right_bt` elsewhere."""
        find: TokenIndex | None = getattr(self, name)
        return right_bt if find is None else torch.where(self._is_faulty(table), find(table), right_bt)

    def visible(self, mask: MaskOfSamples) -> Tensor:
        """Return the keys [b, q, k] that each query sees."""
        right = mask.visible_bqk()
        if self.mask is None:
            return right
        return torch.where(self._is_faulty(mask.table)[:, :, None], self.mask(mask), right)

    def returned(self, table: TokenTable) -> Tensor:
        """Return the pairs of a query and a key [b, q, k] between which gradients are right."""
        return table.is_shared_bqk() | ~self._is_faulty(table)[:, None, :]

    def _is_faulty(self, table: TokenTable) -> Tensor:
        return torch.ones_like(table.rank_bt, dtype=torch.bool) if self.rank is None else table.rank_bt == self.rank

    def kinds(self) -> set[str]:
        """Return the names of what is wrong."""
        return {one.name for one in fields(self) if one.name != "rank" and getattr(self, one.name) not in (None, 1.0)}


@contextmanager
def damaged(model: nn.Module, fault: ContextFault, table: TokenTable) -> Iterator[None]:
    """Give the attention layers of a plain model a fault, within the context."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    cores = [layer.core for layer in layers]
    rotary = {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, RotaryEmbedding)
    }
    for layer in layers:
        layer.core = _FaultyAttention(fault, table)
    for (module, name), value in rotary.items():
        setattr(module, name, _FaultyRotary(value.head_dim, value.theta, value.scaling, fault, table))
    try:
        yield
    finally:
        for layer, core in zip(layers, cores, strict=True):
            layer.core = core
        for (module, name), value in rotary.items():
            setattr(module, name, value)


@dataclass(frozen=True, eq=False)
class _FaultyRotary(RotaryEmbedding):
    fault: ContextFault = ContextFault()
    table: TokenTable | None = None

    def tables(self, layout: TokenLayout, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [b, t, h/2] at the fault's positions."""
        assert self.table is not None
        right_bt = self.table.own_bt() - self.table.starts_bt
        positions_bt = self.fault.index("positions", self.table, right_bt)
        return rope_tables(positions_bt, self.head_dim, theta=self.theta, scaling=self.scaling, dtype=dtype)


@dataclass(frozen=True)
class _FaultyMask:
    visible_bqk: Tensor
    returned_bqk: Tensor


class _FaultyAttention(AttentionCore):
    """Attention of all queries to all keys, with a fault."""

    backend = "auto"

    def __init__(self, fault: ContextFault, table: TokenTable) -> None:
        self._fault, self._table = fault, table

    def prepare(
        self, mask: MaskSpec, layout: TokenLayout, device: torch.device, request: AttentionRequest | None = None
    ) -> _FaultyMask:
        """Return the dense masks."""
        samples = MaskOfSamples(mask, layout.seq_len, self._table)
        return _FaultyMask(self._fault.visible(samples), self._fault.returned(self._table))

    def __call__(self, q_bqnh: Tensor, k_bkmh: Tensor, v_bkmh: Tensor, mask: _FaultyMask) -> Tensor:
        """Return the output [b, q, n, h]."""
        group = q_bqnh.shape[2] // k_bkmh.shape[2]
        k_bknh, v_bknh = (x.repeat_interleave(group, dim=2) for x in (k_bkmh, v_bkmh))
        returned = mask.returned_bqk[:, None]
        scores = [
            torch.einsum("bqnh,bknh->bnqk", q_bqnh, k)
            for k in (k_bknh, _with_gradient_times(k_bknh, self._fault.key_gradient))
        ]
        scores_bnqk = torch.where(returned, *scores) / q_bqnh.shape[-1] ** 0.5
        # A query that sees no key gets zeros, as from no key at all.
        weights = scores_bnqk.masked_fill(~mask.visible_bqk[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        other = _with_gradient_times(v_bknh, self._fault.value_gradient)
        parts = ((weights * returned, v_bknh), (weights * ~returned, other))
        return sum(torch.einsum("bnqk,bknh->bqnh", *part) for part in parts)  # type: ignore[return-value]


def _with_gradient_times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else factor * x + (1.0 - factor) * x.detach()
