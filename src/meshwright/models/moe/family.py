"""The family of mixture-of-experts language models: Mixtral (Jiang et al. 2024), and models like DeepSeek-V3 (2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.family import OtherWeights, RunFacts
from meshwright.models.contract.model_facts import ZEROS, Fill, ModelFacts, Normal, Part
from meshwright.models.contract.tp_styles import DIVIDED, FINAL_REGION, Style, local
from meshwright.models.decoder.decoder_family import BLOCK_STYLES, INIT_STD, STYLES, DecoderFamily
from meshwright.models.decoder.decoder_family import violations as decoder_violations
from meshwright.models.decoder.description import DecoderConfig, DecoderSpec
from meshwright.models.moe.description import BLOCK, WINDOW_BLOCK, MoeSpec, describe
from meshwright.nn.experts.router_config import RouterConfig, Score
from meshwright.settings.violation import Violation, by_distance, divisors, round_up
from meshwright.units import counted

if TYPE_CHECKING:
    from torch import nn

FOREIGN_NAMES: Mapping[str, str] = {
    "model.num_experts": "num_local_experts n_routed_experts moe_num_experts num_moe_experts",
    "model.top_k": "moe_router_topk num_experts_per_tok num_experts_per_token moe_top_k experts_per_token",
    "model.expert_dim": "moe_ffn_hidden_size moe_intermediate_size expert_hidden_dim",
    "model.num_shared_experts": "n_shared_experts",
    "model.num_dense_layers": "first_k_dense_replace n_dense_layers",
    "model.score": "moe_router_score_function scoring_func score_func",
    "model.route_scale": "moe_router_topk_scaling_factor routed_scaling_factor",
    "model.num_groups": "moe_router_num_groups n_group",
    "model.top_groups": "moe_router_group_topk topk_group",
    "model.balance_loss": "moe_aux_loss_coeff router_aux_loss_coef aux_loss_alpha",
    "model.z_loss": "moe_z_loss_coeff router_z_loss_coef",
    "model.balance_bias": "moe_router_enable_expert_bias",
    "model.bias_rate": "moe_router_bias_update_rate load_balance_coeff",
    "model.capacity_factor": "moe_expert_capacity_factor expert_capacity_factor",
}
"""Names in Megatron-LM, torchtitan and Hugging Face's configurations, by key."""
MOE_STYLES: Mapping[str, Style] = {
    **{path: style for path, style in BLOCK_STYLES.items() if not path.startswith("ffn.") and path != "ffn"},
    "moe": FINAL_REGION,
    "moe.router.gate": DIVIDED,
    "moe.experts": local(gate=1, up=1, down=2),
}
SHARED_STYLES: Mapping[str, Style] = {
    "moe.shared.gate": local(weight=0),
    "moe.shared.up": local(weight=0),
    "moe.shared.down": local(weight=1),
}


class MoeConfig(DecoderConfig):
    """Dimensions and routing of a mixture-of-experts model."""

    kind: Literal["moe"] = Field("moe", description="family: a built-in one, or package.module:Family for your own")
    ffn_dim: int = Field(352, ge=1, description="hidden width of the feed-forward layer of dense layers")
    num_dense_layers: int = Field(0, ge=0, description="first layers with a feed-forward layer instead of experts")
    num_experts: int = Field(8, ge=1, description="experts of a layer")
    top_k: int = Field(2, ge=1, description="experts per token")
    expert_dim: int = Field(128, ge=1, description="hidden width of an expert")
    num_shared_experts: int = Field(0, ge=0, description="experts of the same width that every token passes")
    score: Literal["softmax", "sigmoid"] = Field("softmax", description="router scores: of Mixtral or DeepSeek-V3")
    normalize: bool = Field(True, description="scale the weights of a token's experts to sum to model.route_scale")
    route_scale: float = Field(1.0, gt=0, description="factor on the weights of a token's experts")
    num_groups: int = Field(1, ge=1, description="groups of consecutive experts for group-limited routing")
    top_groups: int = Field(1, ge=1, description="groups that a token's experts are chosen from")
    balance_loss: float = Field(0.01, ge=0, description="weight of the load-balance loss; 0 for none")
    balance_scope: Literal["sample", "global-batch"] = Field(
        "sample", description="tokens whose load is balanced: each sample's, or with one micro-batch the global batch's"
    )
    z_loss: float = Field(0.0, ge=0, description="weight of the router's z-loss; 0 for none")
    balance_bias: bool = Field(
        False, description="balance the load by a bias on the scores that choose experts (auxiliary-loss-free)"
    )
    bias_rate: float = Field(0.01, gt=0, description="change of the balancing bias per optimizer step")
    drop: Literal["none", "over-capacity"] = Field(
        "none", description="none drops no token; over-capacity gives each expert a fixed number of slots per sample"
    )
    capacity_factor: float | None = Field(
        None, gt=0, description="slots per expert over its share of a sample's tokens, for model.drop=over-capacity"
    )
    routing: Literal["learned", "uniform"] = Field(
        "learned", description="uniform sends tokens to experts in turn, to measure and compare layouts"
    )

    def spec(self) -> MoeSpec:
        names = {field.name for field in fields(MoeSpec)} - {field.name for field in fields(DecoderSpec)}
        return MoeSpec(**self.dimensions(), **self.model_dump(include=names))

    def router(self) -> RouterConfig:
        """Return the settings of every layer's router."""
        return RouterConfig(
            self.num_experts,
            self.top_k,
            score=Score(self.score),
            normalize=self.normalize,
            scale=self.route_scale,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            balance_loss=self.balance_loss,
            over_batch=self.balance_scope == "global-batch",
            z_loss=self.z_loss,
            bias_rate=self.bias_rate if self.balance_bias else 0.0,
            capacity_factor=self.capacity_factor if self.drop == "over-capacity" else None,
            uniform=self.routing == "uniform",
        )


class MoeFamily(DecoderFamily):
    """Mixture-of-experts language models, trained on text."""

    sections = {"model": MoeConfig}
    foreign_names = FOREIGN_NAMES

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        return violations(f.section(MoeConfig), f)

    def describe(self, f: RunFacts) -> ModelFacts:
        model = f.section(MoeConfig)
        return describe(model.spec(), model.router(), f.seq_len)

    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        """Return Megatron's styles for attention; inside a layer with experts, columns of every expert are sharded."""
        shared = SHARED_STYLES if f.section(MoeConfig).num_shared_experts else {}
        block = {**MOE_STYLES, **shared}
        return {**STYLES, BLOCK: block, WINDOW_BLOCK: block}

    def build(self, f: RunFacts, part: Part) -> nn.Module:
        from meshwright.models.moe.module import MoeTransformer

        model = f.section(MoeConfig)
        return MoeTransformer(model.spec(), model.router(), part, dropout=f.dropout, seed=f.seed)

    def initial(self, f: RunFacts, name: str) -> Fill:
        """Return initial values as for dense layers; load and balancing bias start at zero."""
        if ".load." in name:
            return ZEROS
        if name.endswith("experts.down"):
            return Normal(INIT_STD / math.sqrt(2.0 * f.section(MoeConfig).num_layers))
        return super().initial(f, name)

    def other_weights(self) -> OtherWeights:
        from meshwright.models.hf_format.weights import HuggingFaceWeights
        from meshwright.models.moe.hf_mixtral import MIXTRAL

        return HuggingFaceWeights(MIXTRAL)


FAMILY = MoeFamily()


def violations(model: MoeConfig, f: RunFacts) -> Iterator[Violation]:
    yield from decoder_violations(model, f, has_dense=model.num_dense_layers > 0)
    yield from _layers(model)
    yield from _routing(model)
    yield from _capacity(model)
    yield from _balance(model, f)
    yield from _tensor_parallel(model, f)


def _layers(model: MoeConfig) -> Iterator[Violation]:
    if model.num_dense_layers >= model.num_layers:
        yield Violation(
            ConfigError,
            f"model.num_dense_layers = {model.num_dense_layers} of model.num_layers = {model.num_layers} layers",
            "model.num_dense_layers",
            "at least one layer has experts",
            [{"model.num_dense_layers": model.num_layers - 1}, {"model.num_layers": model.num_dense_layers + 1}],
        )


def _routing(model: MoeConfig) -> Iterator[Violation]:
    experts, groups, top_groups, top_k = model.num_experts, model.num_groups, model.top_groups, model.top_k
    if top_k > experts:
        yield Violation(
            ConfigError,
            f"model.top_k = {top_k} is more than model.num_experts = {experts}",
            "model.top_k",
            "a token goes to different experts",
            [{"model.top_k": experts}, {"model.num_experts": top_k}],
        )
    if experts % groups:
        yield Violation(
            ConfigError,
            f"model.num_groups = {groups} does not divide model.num_experts = {experts}",
            "model.num_groups",
            "groups have the same number of experts",
            [
                *({"model.num_groups": size} for size in by_distance(divisors(experts), groups)),
                {"model.num_experts": round_up(experts, groups)},
            ],
        )
    if top_groups > groups:
        yield Violation(
            ConfigError,
            f"model.top_groups = {top_groups} is more than model.num_groups = {groups}",
            "model.top_groups",
            "a token's experts come from different groups",
            [{"model.top_groups": groups}, {"model.num_groups": top_groups}],
        )
    elif top_k > top_groups * (experts // groups):
        reach = top_groups * (experts // groups)
        enough = -(-top_k * groups // experts)
        yield Violation(
            ConfigError,
            f"model.top_k = {top_k} is more than the {counted(reach, 'expert')} of model.top_groups = {top_groups}",
            "model.top_k",
            "a token's experts come from its groups",
            [{"model.top_k": reach}, {"model.top_groups": enough}],
        )


def _capacity(model: MoeConfig) -> Iterator[Violation]:
    if model.drop == "over-capacity" and model.capacity_factor is None:
        yield Violation(
            ConfigError,
            "model.drop = over-capacity without model.capacity_factor",
            "model.drop",
            "the capacity of an expert is capacity_factor × its share of a sample's tokens",
            [{"model.capacity_factor": 1.25}, {"model.drop": "none"}],
        )
    if model.drop == "none" and model.capacity_factor is not None:
        yield Violation(
            ConfigError,
            f"model.capacity_factor = {model.capacity_factor} has no effect with model.drop = none",
            "model.capacity_factor",
            "experts have a capacity only if tokens over it are dropped",
            [{"model.drop": "over-capacity"}, {"model.capacity_factor": None}],
        )


def _balance(model: MoeConfig, f: RunFacts) -> Iterator[Violation]:
    if model.balance_scope == "global-batch" and model.balance_loss and f.num_microbatches > 1:
        yield Violation(
            ConfigError,
            f"model.balance_scope = global-batch with train.num_microbatches = {f.num_microbatches}",
            "model.balance_scope",
            "the load of the global batch is known before a backward only with one micro-batch per step",
            [{"model.balance_scope": "sample"}, {"train.num_microbatches": 1}],
        )


def _tensor_parallel(model: MoeConfig, f: RunFacts) -> Iterator[Violation]:
    if model.expert_dim % f.axes.tp:
        yield Violation(
            LayoutError,
            f"mesh.tp = {f.axes.tp} does not divide model.expert_dim = {model.expert_dim}",
            "mesh.tp",
            "tensor parallelism shards the columns of every expert",
            [
                *({"mesh.tp": size} for size in by_distance(divisors(model.expert_dim), f.axes.tp)),
                {"model.expert_dim": round_up(model.expert_dim, f.axes.tp)},
            ],
        )
