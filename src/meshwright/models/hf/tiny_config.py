"""Tiny configurations of the causal language models of `transformers`: the same layers, small enough to prove.

A configuration has what the type's own default has, with small sizes (`SIZES`), each kind of layer among its four
layers, and what single types need besides (`tiny_by_hand`).
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
from meshwright.models.hf.source import CONFIG_FILE, KEY, transformers_version
from meshwright.models.hf.tiny_by_hand import BY_HAND, UNSUPPORTED

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
    """Return the fields that make the configuration of a causal type's text model tiny.

    Args:
        model_type: a model type of `transformers`, such as `qwen3`.
        like: a configuration of the text model to take in place of the type's own default.
    """
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

    Args:
        config: configuration of a causal language model.
        seq_len: tokens of a sample.
        longest: tokens that stand for them. Limits are shrunk as they are, so that the same ones are passed.
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
