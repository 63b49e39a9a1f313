"""Sizes of a tiny model by the names that configurations give them. Data only.

A name stands under the value that it gets wherever a configuration has it; whatever one model type needs otherwise is
in `tiny_by_hand`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUM_LAYERS = 4
WIDTH = 64
VOCAB_SIZE = 256
MAX_POSITIONS = 128
WINDOW = 8

_NAMES: tuple[tuple[Any, str], ...] = (
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers"),
    (NUM_LAYERS, "num_decoder_layers num_encoder_layers"),
    (WIDTH, "hidden_size n_embd d_model emb_dim embedding_dim embedding_size input_embedding_size"),
    (WIDTH, "output_embedding_size word_embed_proj_dim lru_width pronunciation_embed_dim"),
    (WIDTH, "shape_embed_dim"),
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    (MAX_POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (MAX_POSITIONS, "max_target_positions max_source_positions"),
    # Attention.
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads"),
    (4, "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads"),
    (2, "num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads num_global_key_value_heads"),
    (16, "head_dim kv_channels v_head_dim qk_nope_head_dim swa_head_dim swa_v_head_dim global_head_dim d_head"),
    (16, "attention_head_size dim_head hidden_size_per_layer_input"),
    (8, "qk_rope_head_dim rotary_dim"),
    (32, "q_lora_rank o_lora_rank"),
    (16, "kv_lora_rank"),
    (WINDOW, "sliding_window sliding_window_size attention_window_size window_size local_attention"),
    (WINDOW, "attention_chunk_size keep_window_size"),
    (True, "use_sliding_window"),
    (16, "query_pre_attn_scalar"),
    (4, "index_n_heads"),
    (16, "index_head_dim"),
    (8, "index_topk"),
    # Feed-forward networks and experts.
    (128, "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff d_inner"),
    (128, "feed_forward_size intermediate_size_mlp dense_intermediate_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size router_hidden_size"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers"),
    # Recurrent layers.
    (8, "state_size ssm_state_size mamba_d_state chunk_size mamba_chunk_size"),
    (8, "mamba_n_heads mamba_num_heads"),
    (16, "mamba_d_head mamba_head_dim mamba_headdim"),
    (1, "n_groups mamba_n_groups mamba_ngroups"),
    (4, "time_step_rank mamba_dt_rank"),
    (4, "linear_num_heads linear_num_value_heads"),
    (2, "linear_num_key_heads"),
    (16, "linear_key_head_dim linear_value_head_dim linear_head_dim"),
    # Nothing random while training, no kernels to fetch, no cache, causal whatever else the type can be.
    (0.0, "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop emb_pdrop dropout activation_dropout"),
    (0.0, "residual_dropout resid_dropout embed_dropout embedding_dropout ffn_dropout mlp_dropout dropout_p"),
    (0.0, "attention_probs_dropout_prob hidden_dropout_prob classifier_dropout classifier_dropout_prob"),
    (0.0, "local_attention_probs_dropout_prob lsh_attention_probs_dropout_prob summary_first_dropout"),
    (0.0, "summary_last_dropout layerdrop decoder_layerdrop encoder_layerdrop router_jitter_noise input_jitter_noise"),
    (False, "use_cache use_mamba_kernels"),
    (True, "is_decoder"),
    (1, "bos_token_id decoder_start_token_id"),
    (2, "eos_token_id forced_eos_token_id sep_token_id cls_token_id"),
    (None, "pad_token_id"),
)  # fmt: skip

SIZES: Mapping[str, Any] = {name: value for value, names in _NAMES for name in names.split()}
"""The small value of every name."""

LIMITS = [
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "model_max_length",
    "context_length",
    "max_target_positions",
    "original_max_position_embeddings",
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "local_attention",
    "attention_chunk_size",
    "keep_window_size",
    "index_topk",
    "floor_scale",
    "log_scaling_n_floor",
    "rel_extent",
    "local_attention_window_len",
    "relative_max_distance",
    "mem_len",
]
"""Numbers of tokens past which a model may treat a token otherwise."""

PER_LAYER = ("intermediate_size",)
"""Sizes that some types give as a list, one per layer."""

ALTERNATING_LISTS = ("layer_types", "layers_block_type", "no_rope_layers", "indexer_types")
"""Lists with a layer's kind of attention or mixer per layer: the kinds take turns."""

LEADING_LISTS = ("mlp_layer_types",)
"""Lists with a layer's kind of feed-forward network per layer: one layer of each kind, the rest of the last."""
