"""Tiny configurations of the causal language models of `transformers`: the same layers, small enough to prove.

A configuration has what the type's own default has, with small sizes (`SIZES`), each kind of layer among its four
layers, and what single types need besides; some types have none.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from meshwright.errors import ConfigError, ModelError
from meshwright.models.hf import private
from meshwright.models.hf.config import CONFIG_FILE, KEY, transformers_version

__all__ = ["UNSUPPORTED", "causal_types", "limits_of", "shrunken_config", "tiny_config", "tiny_fields"]
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


@cache
def causal_types() -> tuple[str, ...]:
    """Return the model types of all causal language models, in the order of `transformers`.

    A type whose text model is another type's is left out: `gemma3` is `gemma3_text` behind images. Those in
    `UNSUPPORTED` are among them.
    """
    return tuple(name for name in private.causal_names() if text_type(name) == name)


def text_type(model_type: str) -> str:
    """Return the model type of a causal type's text model, or the type itself if its text model has none."""
    if model_type not in private.causal_names():
        raise not_causal(model_type, is_name=True)
    config = private.config_class(model_type)
    if model_type in UNSUPPORTED:
        return model_type
    text = private.text_config_class(config)
    return str(text.model_type) if private.is_causal_config(text) else model_type


def tiny_fields(model_type: str, like: Any = None) -> dict[str, Any]:
    """Return the fields that make the configuration of a causal type's text model tiny: its own default, or one like
    that given."""
    model_type = text_type(model_type)
    if model_type in UNSUPPORTED:
        raise ModelError(
            f"{model_type} has no tiny configuration: {UNSUPPORTED[model_type]}",
            where="model.config",
            rule="a model whose logits for each token follow from that token and those before it",
            fix="model.config=qwen3",
        )
    text = private.text_config_class(private.config_class(model_type))
    default = _values(text())
    values = default if like is None else _values(like)
    fields: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(text)):
        if name in SIZES:
            small = _small(name, values)
            if small != default.get(name):
                fields[name] = small
        elif kinds := _kinds(name, values):
            fields[name] = kinds
    return fields | copy.deepcopy(dict(BY_HAND.get(model_type, {})))


def tiny_config(model_type: str) -> Any:
    """Return a tiny configuration of a causal type's text model, as an object of `transformers`.

    A text model that has no type of its own is inside the configuration of the whole.
    """
    return _with_fields(model_type, tiny_fields(model_type))


def _with_fields(model_type: str, fields: dict[str, Any]) -> Any:
    whole = private.config_class(text_type(model_type))
    is_whole = private.text_config_class(whole) is whole
    return whole(**fields) if is_whole else whole(text_config=fields)


def shrunken_config(config: Any, *, seq_len: int, longest: int) -> Any:
    """Return a tiny configuration of the kind of another: with its rotary embeddings, kinds of layers and switches.

    `longest` tokens stand for the `seq_len` of a sample. Limits are shrunk as they are, so that the same ones are
    passed.
    """
    text = config.get_text_config()
    values, fields = _values(text), tiny_fields(config.model_type, text)

    def shrunken(limit: int) -> int:
        return max(4, limit * longest // seq_len) if limit < seq_len else limit * longest // seq_len + longest

    for name in (field.name for field in dataclasses.fields(text)):
        value, is_size = values.get(name), name in SIZES and name != "use_sliding_window"
        if name in LIMITS:
            fields[name] = shrunken(value) if isinstance(value, int) else value
        elif name in ALTERNATING_LISTS and isinstance(value, list):
            fields[name] = _in_turn(value)
        elif isinstance(value, bool | float | str) and not is_size:
            fields[name] = value
    if isinstance(rope := values.get("rope_parameters"), dict):
        tiny = _values(_with_fields(config.model_type, fields).get_text_config())
        fields["rope_parameters"] = _shrunken_rope(rope, shrunken, _rotary_width(tiny) / _rotary_width(values))
    return _with_fields(config.model_type, fields)


def _shrunken_rope(rope: Mapping[str, Any], shrunken: Callable[[int], int], ratio: float) -> dict[str, Any]:
    """Return rotary parameters, perhaps by kind of layer, for heads whose width has changed by a ratio."""
    found = dict(rope)
    for name, value in rope.items():
        if isinstance(value, Mapping):
            found[name] = _shrunken_rope(value, shrunken, ratio)
        elif name in LIMITS and isinstance(value, int):
            found[name] = shrunken(value)
        elif isinstance(value, list) and name.endswith("_factor"):  # one for each frequency
            count = max(1, round(len(value) * ratio))
            found[name] = [value[place * len(value) // count] for place in range(count)]
        elif isinstance(value, list) and name.endswith("_section"):  # how many frequencies each
            rest = [max(1, round(size * ratio)) for size in value[1:]]
            found[name] = [round(sum(value) * ratio) - sum(rest), *rest]
    return found


def _rotary_width(values: Mapping[str, Any]) -> int:
    width = values.get("qk_rope_head_dim") or values.get("head_dim")
    return int(width or values["hidden_size"] // values["num_attention_heads"])


def limits_of(config: Any) -> list[int]:
    """Return the numbers of tokens past which a model may treat a token otherwise, the largest first."""
    values = _values(config.get_text_config())
    rope = values.get("rope_parameters") or {}
    parts = [values, rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    found = {part.get(name) for part in parts for name in LIMITS}
    return sorted((limit for limit in found if isinstance(limit, int) and limit > 0), reverse=True)


def not_causal(model_type: str, *, is_name: bool = False) -> ConfigError:
    """Return the error for a model type without a causal language model; `is_name` if no folder has given it."""
    known = private.is_known(model_type)  # such as an encoder, which no name is a misspelling of
    nearest = [] if known else difflib.get_close_matches(model_type.lower(), private.causal_names(), n=1)
    newer = "" if known else ", or if the type is newer: pip install --upgrade transformers"
    missing = f"there is no folder {model_type}, and " if is_name else ""
    path = f", or the path of a folder with a {CONFIG_FILE}" if is_name else ""
    return ConfigError(
        f"{missing}{model_type!r} is no causal language model of the installed transformers {transformers_version()}",
        where=KEY,
        rule="a model type that AutoModelForCausalLM knows",
        fix=f"{KEY}={nearest[0] if nearest else 'qwen3'}{path}{newer}",
    )


def _values(config: Any) -> dict[str, Any]:
    """Values of a configuration by all names they go by."""
    values = dict(vars(config))
    return values | {alias: values[name] for alias, name in config.attribute_map.items() if name in values}


def _small(name: str, default: Mapping[str, Any]) -> Any:
    old = default.get(name)
    small = SIZES[name]
    if name == "num_key_value_heads" and "qk_nope_head_dim" in default:
        return SIZES["num_attention_heads"]  # keys of all heads come from one latent vector
    if name == "sliding_window" and "use_sliding_window" in default:
        return small  # None as long as windows are off, and they are turned on
    if old is None:
        return None
    return [small] * NUM_LAYERS if isinstance(old, list) and name in PER_LAYER else small


def _kinds(name: str, default: Mapping[str, Any]) -> list[Any]:
    """A kind for each layer, if `name` is such a list: every kind that the default has."""
    old = default.get(name)
    if name not in (*ALTERNATING_LISTS, *LEADING_LISTS) or not isinstance(old, list):
        return []
    kinds = list(dict.fromkeys(old))
    if kinds == ["full_attention"] and "use_sliding_window" in default:
        kinds = ["sliding_attention", "full_attention"]
    if name in LEADING_LISTS:
        return [kinds[min(layer, len(kinds) - 1)] for layer in range(NUM_LAYERS)]
    return _in_turn(kinds)


def _in_turn(kinds: list[Any]) -> list[Any]:
    """Return a kind for each layer, out of those in a list."""
    distinct = list(dict.fromkeys(kinds))
    return [distinct[layer % len(distinct)] for layer in range(NUM_LAYERS)]


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
