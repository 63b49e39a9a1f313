"""Files of a Hugging Face directory besides the weights: kept by an import, and written again by exports. Torch-free.

Tokenizer and generation settings are copied verbatim. `config.json` keeps every key of the original, since a checkpoint
only loads into the model that it describes; what training can change is set: the dtype and the context length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.data.tokenizer import SEPARATOR_NAMES
from meshwright.data.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES, read_files, vocabulary
from meshwright.errors import CheckpointError
from meshwright.models.huggingface.architecture import Architecture, Model
from meshwright.models.huggingface.checks import CONFIG
from meshwright.models.huggingface.decoder_config import DEFAULT_MAX_SEQ_LEN
from meshwright.units import counted

KEPT = (CONFIG, "generation_config.json", *TOKENIZER_FILES)
CONTEXT = "max_position_embeddings"


def read_kept(source: Path, *, vocab_size: int) -> dict[str, bytes]:
    """Read the files of a Hugging Face directory that an import keeps, by path inside it.

    Args:
        source: the directory.
        vocab_size: rows of the embedding.

    Raises:
        CheckpointError: the tokenizer is damaged or has ids outside the vocabulary.
        DataError: a file cannot be read.
    """
    kept = read_files(source, KEPT)
    if TOKENIZER in kept:
        _check_vocabulary(kept[TOKENIZER], vocab_size, source / TOKENIZER)
    return kept


def files_to_write(
    architecture: Architecture,
    model: Model,
    kept: Mapping[str, bytes],
    *,
    dtype: str,
    max_seq_len: int | None,
    where: str,
) -> dict[str, bytes]:
    """Return the files of an export besides the weights.

    Args:
        architecture: the class in `transformers`.
        model: our description.
        kept: sidecar files of the checkpoint.
        dtype: torch's name of the weights' dtype, such as `bfloat16`.
        max_seq_len: tokens of a training sample, if known. The original context length is kept if it is larger.
        where: path of the checkpoint, for errors.

    Raises:
        CheckpointError: the original `config.json` describes another model.
    """
    config = architecture.write_config(model, dtype=dtype, max_seq_len=max_seq_len)
    files = dict(kept)
    if CONFIG in kept:
        config = _updated(json.loads(kept[CONFIG]), config, max_seq_len=max_seq_len)
        _check_same_model(architecture, model, config, where)
    else:
        special = _special_tokens(kept)
        ids = vocabulary(kept[TOKENIZER]) if TOKENIZER in kept else {}
        config |= {f"{name}_id": ids[token] for name, token in special.items() if token in ids}
        if TOKENIZER in kept:
            # Without a class, transformers 4 takes the model's, which may split text in another way.
            files.setdefault(TOKENIZER_CONFIG, to_json({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    files[CONFIG] = to_json(config)
    return files


def to_json(data: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(data, indent=2) + "\n").encode()


def _updated(kept: dict[str, Any], ours: Mapping[str, Any], *, max_seq_len: int | None) -> dict[str, Any]:
    """Return the original `config.json` with the dtype of the weights, and a context that covers the samples."""
    config = dict(kept)
    dtype_keys = [key for key in ("torch_dtype", "dtype") if key in kept] or ["torch_dtype", "dtype"]
    config |= {key: ours[key] for key in dtype_keys}
    if max_seq_len is None or max_seq_len <= (kept.get(CONTEXT) or DEFAULT_MAX_SEQ_LEN):
        return config
    config[CONTEXT] = max_seq_len
    for key in ("rope_scaling", "rope_parameters"):
        if kept.get(key):  # the length before scaling is the context length unless given
            config[key] = {**(ours[key] or {}), **kept[key]}
    if "sliding_window" in kept and "sliding_window" in ours:
        config["sliding_window"] = ours["sliding_window"]  # no window was shorter than the context
    return config


def _check_same_model(architecture: Architecture, model: Model, config: Mapping[str, Any], where: str) -> None:
    described = json.loads(json.dumps(architecture.read_config(config, where=f"{where}, {CONFIG}")))
    different = [key for key, value in described.items() if model.get(key) != value]
    if different:
        key = different[0]
        raise CheckpointError(
            f"the checkpoint's {CONFIG} has {key} = {described[key]}, but its weights have {model.get(key)}",
            where=where,
            rule=f"the {CONFIG} kept by an import describes the weights of all later checkpoints",
            fix="import the original weights again, and continue from that checkpoint",
        )


def _special_tokens(kept: Mapping[str, bytes]) -> dict[str, str]:
    """Return the tokens that begin and end a text; the end defaults to the separator of documents in training."""
    try:
        named = dict(json.loads(kept.get(TOKENIZER_CONFIG, b"{}")))
    except (TypeError, ValueError):  # a file beside the tokenizer that is not its configuration
        named = {}
    found = {}
    for name in ("bos_token", "eos_token"):
        token = named.get(name)
        found[name] = token.get("content") if isinstance(token, dict) else token
    if TOKENIZER in kept and found["eos_token"] is None:
        ids = vocabulary(kept[TOKENIZER])
        found["eos_token"] = next((token for token in SEPARATOR_NAMES if token in ids), None)
    return {name: token for name, token in found.items() if token is not None}


def _check_vocabulary(content: bytes, vocab_size: int, path: Path) -> None:
    try:
        ids = vocabulary(content)
    except ValueError as error:
        raise CheckpointError(
            f"{path.name} is not a tokenizer: {error}",
            where=str(path),
            rule="a tokenizer.json is JSON with a vocabulary",
            fix="download the file again, or remove it to import the weights without a tokenizer",
        ) from None
    token, last = max(ids.items(), key=lambda item: item[1], default=("", -1))
    if last >= vocab_size:
        raise CheckpointError(
            f"{path.name} has the token {token!r} with id {last}, but the model has {counted(vocab_size, 'embedding')}",
            where=str(path),
            rule=f"ids of tokens are below vocab_size = {vocab_size}; the vocabulary may be padded, but not cut",
            fix=f"use the tokenizer of these weights, or model.resize_token_embeddings({last + 1}) in transformers",
        )
