"""Torch-free description of a mixture-of-experts model: dimensions, parameters and costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from meshwright.models.contract.building_blocks import residual_sum
from meshwright.models.contract.model_facts import (
    AuxiliaryLoss,
    BufferFacts,
    ExpertFacts,
    KindFacts,
    LinearInput,
    ModelFacts,
    ParameterFacts,
    Role,
    Saved,
    linear,
)
from meshwright.models.contract.operators import Rerun
from meshwright.models.decoder.description import BLOCK as DENSE_BLOCK
from meshwright.models.decoder.description import DecoderSpec, attention_inputs
from meshwright.models.decoder.description import describe as describe_dense
from meshwright.models.moe.operators import experts_operators
from meshwright.nn.experts.router_config import RouterConfig, Score

BLOCK, WINDOW_BLOCK = "moe_block", "window_moe_block"
"""Names of the kinds of blocks with experts: without and with a sliding window."""


@dataclass(frozen=True)
class MoeSpec(DecoderSpec):
    """Dimensions of a mixture-of-experts model; `ffn_dim` is the hidden width of dense layers."""

    kind: ClassVar[str] = "moe"
    num_dense_layers: int = 0
    """First layers, with a feed-forward layer instead of experts."""
    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 128
    """Hidden width of an expert."""
    num_shared_experts: int = 0
    """Shared experts, computed as one of `num_shared_experts · expert_dim` columns."""
    score: str = "softmax"
    normalize: bool = True
    route_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    balance_bias: bool = False
    """Whether the router has a balancing bias."""

    @property
    def shared_dim(self) -> int:
        """Hidden width of the shared experts."""
        return self.num_shared_experts * self.expert_dim


def describe(spec: MoeSpec, router: RouterConfig, seq_len: int) -> ModelFacts:
    """Describe a model trained on samples of `seq_len` tokens."""
    dense = describe_dense(spec, seq_len)
    routed = {kind.name: _moe_block(spec, router, kind, seq_len) for kind in dense.kinds}
    blocks = [dense.kind_of(layer) for layer in range(spec.num_dense_layers)]
    blocks += [routed[name] for name in dense.layers[spec.num_dense_layers :]]
    return replace(
        dense,
        kinds=tuple({block.name: block for block in blocks}.values()),
        layers=tuple(block.name for block in blocks),
        identity=spec.identity(),
        flops_per_token=3.0 * sum(kind.flops for kind in (*blocks, *dense.last)),
    )


def _moe_block(spec: MoeSpec, router: RouterConfig, block: KindFacts, seq_len: int) -> KindFacts:
    """Describe a block with experts, given that of a dense block."""
    dim, hidden, shared = spec.dim, spec.expert_dim, spec.shared_dim
    capacity = router.capacity(seq_len)
    copies = float(spec.top_k) if capacity is None else capacity * spec.num_experts / seq_len
    # Chosen experts, whether each has a slot, and counts per sample; the order of rows, their tokens and offsets.
    choices = 9.0 * spec.top_k + 8.0 * spec.num_experts / seq_len
    recalled = Saved(fixed_bytes=choices + 8.0 * (3.0 * copies + 1.0))
    # Rows by expert with their weights, four hidden activations and the weighted one.
    others = Saved(
        full=copies * dim, divided=5.0 * hidden * copies + 4.0 * shared - 4.0 * spec.ffn_dim, wide_full=copies
    )
    others += _saved_by_router(spec, router) + recalled
    assert block.fused is not None, "a dense block says what it saves with fused norms"
    return KindFacts(
        BLOCK if block.name == DENSE_BLOCK else WINDOW_BLOCK,
        block.path,
        (*(p for p in block.parameters if not p.name.startswith("ffn.")), *_moe_parameters(spec)),
        buffers=_buffers(spec),
        saved=block.saved + others,
        fused=block.fused + others,  # compiled too: experts stay eager
        recalled=recalled,
        linear_inputs=(*attention_inputs(dim, spec.num_heads * spec.head_dim), *_shared_inputs(spec)),
        operators=(
            *(one for one in block.operators if not one.name.startswith("ffn.") and one.name not in ("ffn", "ffn_add")),
            *experts_operators("moe", dim, hidden, router, copies=copies, shared=shared),
            residual_sum("moe_add", dim, rerun=Rerun.NEVER),
        ),
        attention=block.attention,
        auxiliary=tuple(
            AuxiliaryLoss(name, weight, in_region=True)
            for name, weight in (("balance", router.balance_loss), ("z", router.z_loss))
            if weight
        ),
        experts=ExpertFacts(
            "moe",
            "moe.experts",
            spec.num_experts,
            spec.top_k,
            width=dim,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            capacity=capacity,
            over_batch=bool(router.balance_loss) and router.over_batch,
            over_sample=bool(router.balance_loss) and not router.over_batch,
            uniform=router.uniform,
        ),
    )


def _shared_inputs(spec: MoeSpec) -> tuple[LinearInput, ...]:
    """Return the inputs of shared experts' layers; routed experts read the first one, too."""
    if not spec.num_shared_experts:
        return ()
    return (
        LinearInput(("moe.shared.gate", "moe.shared.up"), spec.dim),
        LinearInput(("moe.shared.down",), spec.shared_dim, divided=True, freed=Saved(divided=spec.shared_dim)),
    )


def _saved_by_router(spec: MoeSpec, router: RouterConfig) -> Saved:
    sums = 2.0 * (router.normalize + (router.score is not Score.SOFTMAX))
    logits = spec.num_experts + 1.0 if router.z_loss else 0.0
    return Saved(wide_full=spec.num_experts + spec.top_k + sums + logits)


def _moe_parameters(spec: MoeSpec) -> tuple[ParameterFacts, ...]:
    dim, hidden = spec.dim, spec.expert_dim
    wide, narrow = (spec.num_experts, hidden, dim), (spec.num_experts, dim, hidden)
    shared = (
        *linear("moe.shared.gate", dim, spec.shared_dim),
        *linear("moe.shared.up", dim, spec.shared_dim),
        *linear("moe.shared.down", spec.shared_dim, dim),
    )
    return (
        *linear("moe.router.gate", dim, spec.num_experts),
        ParameterFacts("moe.experts.gate", wide, Role.EXPERTS),
        ParameterFacts("moe.experts.up", wide, Role.EXPERTS),
        ParameterFacts("moe.experts.down", narrow, Role.EXPERTS),
        *(shared if spec.num_shared_experts else ()),
    )


def _buffers(spec: MoeSpec) -> tuple[BufferFacts, ...]:
    load = BufferFacts("moe.router.load.value", (spec.num_experts,), "int64", updated=True, load=True)
    bias = BufferFacts("moe.router.load.bias", (spec.num_experts,), "float32")
    return (load, bias) if spec.balance_bias else (load,)
