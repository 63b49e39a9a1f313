"""Fields of single types in a tiny configuration besides the common sizes, and types that have none. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL_AND_SLIDING = ["sliding_attention", "full_attention"] * 2
DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
CONV_AND_FULL = ["conv", "full_attention"] * 2

# Positions count from the padding token's id on, which is a row of the position table.
POSITIONS_BEHIND_PADDING = {"pad_token_id": 0, "max_position_embeddings": 136}

# A dense layer among those with experts: the default has none.
ONE_DENSE_LAYER = {"mlp_only_layers": [0]}

BY_HAND: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},  # the kinds are computed from it; none by default
    "big_bird": {"attention_type": "original_full"},  # sparse blocks are no causal attention
    "blt": {  # five transformers, each with a configuration of its own
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "local_attention_window_len": 8,
        **{
            f"{part}_config": {
                "vocab_size": 256, "hidden_size": 64, "hidden_size_global": 64, "num_attention_heads": 4,
                "num_hidden_layers": num_layers, "intermediate_size": 128, "max_position_embeddings": 128,
            }
            for part, num_layers in (("patcher", 2), ("encoder", 2), ("global", 4), ("decoder", 2))
        },
    },
    "camembert": POSITIONS_BEHIND_PADDING,
    "cohere2_moe": {"mlp_layer_types": DENSE_FIRST},  # the default has no dense layer
    "cohere_compass_text": {  # rotary parameters per kind of layer, and none by default; full attention has none
        "layer_types": FULL_AND_SLIDING,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "data2vec-text": POSITIONS_BEHIND_PADDING,
    "dbrx": {  # attention and experts have configurations of their own; the default lacks a base and a clip
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},  # None by default
    "deepseek_v4": {  # blocks of 128 tokens, of which a tiny sequence has none
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "o_groups": 2,
    },
    "dots1": {  # None by default, and full attention only
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "layer_types": FULL_AND_SLIDING,
    },
    "dots3_note_text": {  # layers with a sliding window have sizes of their own, which are no fields
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 16,
        "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
    },
    "emu3": {"pad_token_id": 0},  # None is refused
    "falcon": {"new_decoder_architecture": True},  # the old one has one key head whatever num_kv_heads says
    "falcon_h1": {"mamba_d_ssm": 128},  # heads × head size
    "flint": ONE_DENSE_LAYER,
    "gemma3n_text": {  # lists per layer; the last two layers take the keys of the two before
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "laurel_rank": 8,
    },
    "gemma4_text": {"global_head_dim": 32},  # no field; full attention has larger heads
    "gemma4_unified_text": {"global_head_dim": 32},
    "git": {  # a vision encoder is always built
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
            "image_size": 32,
        }
    },
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},  # the default never shares
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},  # kinds and how often they repeat
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},  # the default has no attention
    "hunyuan_v1_dense": {"head_dim": 16},  # None by default, and not computed
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling2_text": {"unpadded_vocab_size": 256, "n_layers_per_attn_res_block": 2, "rel_extent": 32},
    "inkling_text": {"mlp_layer_types": DENSE_FIRST, "rel_extent": 32},  # the default has no dense layer
    "jamba": {  # the kinds are computed: attention in layer 1, experts in layers 1 and 3
        "attn_layer_period": 4, "attn_layer_offset": 1,
    },
    "laguna": {"layer_types": FULL_AND_SLIDING},  # full attention only by default
    "lfm2": {"layer_types": CONV_AND_FULL},  # full attention only by default
    "lfm2_moe": {"layer_types": CONV_AND_FULL},  # no list by default, and not computed
    "llama4_text": {"interleave_moe_layer_step": 2},  # every second layer dense; none by default
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "zero_expert_num": 2},  # a layer is two
    "mamba2": {"num_heads": 8},  # heads × head size must be expand × width
    "mellum": {"layer_types": FULL_AND_SLIDING, "mlp_layer_types": DENSE_FIRST},  # one kind each by default
    "minicpm3": {"dim_model_base": 64},  # logits are divided by width / base, and base is a full model's width
    "minimax_m3_vl_text": {  # one kind each by default
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "mlp_layer_types": DENSE_FIRST,
        "index_block_size": 4, "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 16, "layer_types": FULL_AND_SLIDING},  # None by default; sliding windows only
    "mllama": {"cross_attention_layers": []},  # they take an image, and are left out without one
    "modernbert-decoder": {"pad_token_id": 0},  # None is refused
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},  # None by default, and not computed
    "phi4_multimodal": {  # encoders of images and speech are always built
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 56, "crop_size": 56,
        },
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 2,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32,
        },
    },
    "prophetnet": {"pad_token_id": 0, "add_cross_attention": False},  # positions behind padding; no encoder
    "qwen2_moe": ONE_DENSE_LAYER,
    "qwen3_moe": ONE_DENSE_LAYER,
    "qwen3_next": ONE_DENSE_LAYER,
    "qwen4_exp_text": {  # an indexer without sizes by default
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "hc_lowrank": 16,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},  # a pattern, not a list of all layers
    "reformer": {  # hashed layers sort all tokens of a row, later ones too; axial positions train at one length only
        "attn_layers": ["local"] * 4, "axial_pos_embds": False, "local_attn_chunk_length": 8,
    },
    "roberta": POSITIONS_BEHIND_PADDING,
    "roberta-prelayernorm": POSITIONS_BEHIND_PADDING,
    "roc_bert": {"shape_vocab_size": 256, "pronunciation_vocab_size": 256},
    "xlm": {"causal": True, "pad_token_id": 0},  # both ways by default; lengths are counted from the padding
    "xlm-roberta": POSITIONS_BEHIND_PADDING,
    "xlm-roberta-xl": POSITIONS_BEHIND_PADDING,
    "xlnet": {"attn_type": "uni"},  # both ways by default
    "xlstm": {"mode": "train"},  # inference keeps states in float32
    "xmod": POSITIONS_BEHIND_PADDING | {"default_language": "en_XX"},  # an adapter per language
    "youtu": {"embedding_initializer_range": 0.02},
    "zamba2": {"adapter_rank": 8},
    "zaya": {  # one expert per token is all that it has; one kind of layer by default
        "num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window": 8,
    },
}  # fmt: skip

UNSUPPORTED: Mapping[str, str] = {
    "cpmant": "it attends both ways: all tokens of a row are context",
    "gemma4_assistant": "drafts for a larger model, whose hidden states it takes",
    "gemma4_unified_assistant": "drafts for a larger model, whose hidden states it takes",
    "musicgen": "its tokens are audio codes, several per step, and a text encoder comes before it",
    "musicgen_melody": "its tokens are audio codes, several per step, and a text encoder comes before it",
}
"""Model types without a tiny configuration, and why."""

FLOAT32_ONLY: Mapping[str, str] = {
    "inkling2_text": "its router multiplies a float32 input with the weight as it is",
    "xglm": "its mask takes float64's least number as a float32",
}
"""Model types whose forward fails in float64 as it stands, and why."""
