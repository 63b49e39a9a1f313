"""Configuration of a mixture-of-experts model. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Literal

from pydantic import Field

from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.description import DecoderSpec
from meshwright.models.moe.description import MoeSpec
from meshwright.nn.experts.router_config import RouterConfig, Score

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
        """Return the model's dimensions with defaults filled in."""
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
