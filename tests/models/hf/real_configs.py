"""Published configurations of large models, as their `config.json` has them, with the sizes that their makers state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Real:
    """A published model."""

    config: dict[str, Any]
    published: float
    """Number of parameters that its makers state."""
    counts: str
    """Where they state it, and what it counts."""
    layouts: tuple[str, ...]
    most_gib: float | None = None
    """Memory that a rank has at most on each of them, in GiB, if that is asked."""


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
REAL = {
    "Qwen3-30B-A3B": Real(
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "output_router_logits": False,
            "router_aux_loss_coef": 0.001, "use_sliding_window": False,
        },
        30.5e9, "model card: 30.5B in total, 3.3B of them activated",
        ("mesh.dp_shard=32 mesh.cp=2 mesh.ep=16", "mesh.pp=8 mesh.dp_shard=8"),
    ),
    "DeepSeek-V3": Real(
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
            "norm_topk_prob": True, "first_k_dense_replace": 3, "vocab_size": 129280,
            "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6,
            "rope_scaling": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
            "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
        },
        671e9, "technical report: 671B without the module of multi-token prediction, which transformers leaves out too",
        ("mesh.pp=16 mesh.dp_shard=64 mesh.ep=32 train.num_microbatches=32 recompute.policy=full",),
        most_gib=80.0,
    ),
    "gpt-oss-120b": Real(
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
            "num_experts_per_tok": 4, "attention_bias": True, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18, "vocab_size": 201088,
            "max_position_embeddings": 131072, "rope_theta": 150000, "rms_norm_eps": 1e-5, "swiglu_limit": 7.0,
            "rope_scaling": {**YARN, "factor": 32.0, "truncate": False}, "tie_word_embeddings": False,
            "output_router_logits": False, "router_aux_loss_coef": 0.9,
        },
        116.83e9, "model card, table 1: 116.83B, embeddings and the head among them",
        ("mesh.pp=4 mesh.dp_shard=32 mesh.ep=16",),
    ),
    "Llama-3.1-405B": Real(
        {
            "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
            "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": False,
        },
        405e9, "the model's name; 405.85B by its dimensions",
        ("mesh.tp=8 mesh.pp=16 mesh.dp_shard=8",),
    ),
    "Mixtral-8x22B": Real(
        {
            "model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
            "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "vocab_size": 32768, "max_position_embeddings": 65536, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "output_router_logits": False, "router_aux_loss_coef": 0.001,
        },
        141e9, "announcement: 141B in total, 39B of them active",
        ("mesh.tp=8 mesh.dp_shard=16 mesh.ep=8",),
    ),
}  # fmt: skip


def write_config(folder: Path, name: str) -> Path:
    """Write a folder with a model's config.json alone."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(REAL[name].config), "utf-8")
    return path
