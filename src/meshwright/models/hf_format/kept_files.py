"""Files of a Hugging Face directory besides the weights: kept by an import, and written again by exports.

Tokenizer and generation settings are copied. `config.json` keeps every key of the original, since a checkpoint only
loads into the model that it describes. What training can change is set: dtype, context length, end of generation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.tokenizer_files import (
    SEPARATOR_NAMES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TOKENS_MAP,
    read_files,
    token_text,
    vocabulary,
)
from meshwright.errors import CheckpointError
from meshwright.models.hf_format.architecture import DEFAULT_MAX_SEQ_LEN, Architecture, Model
from meshwright.models.hf_format.checks import CONFIG
from meshwright.units import counted

GENERATION = "generation_config.json"
KEPT = (CONFIG, GENERATION, *TOKENIZER_FILES)
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
CONTEXT, EOS, EOS_ID = "max_position_embeddings", "eos_token", "eos_token_id"


def read_kept(source: Path, *, vocab_size: int) -> dict[str, bytes]:
    """Read the files of a Hugging Face directory that an import keeps, by path inside it.

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
    end_ids: Sequence[int] = (),
    where: str,
) -> dict[str, bytes]:
    """Return the files of an export besides the weights, given the checkpoint's sidecar files. The original context
    length is kept if it is larger than `max_seq_len`, the tokens of a training sample. Raise a CheckpointError if the
    original `config.json` describes another model."""
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
    return with_ends(files, end_ids)


def with_ends(files: Mapping[str, bytes], end_ids: Sequence[int]) -> dict[str, bytes]:
    """Return the files of an export with generation ending where training taught it, besides where it ended before.

    The first of the ids of tokens that end a turn or a document becomes the tokenizer's, unless a chat template has
    `eos_token`: it would write another text than in training.
    """
    models = {name: json_object(files[name]) for name in (GENERATION, CONFIG) if name in files}
    before = [config.get(EOS_ID) for config in models.values()]
    ids = [*end_ids, *(one for ids in before for one in (ids if isinstance(ids, list) else [ids]) if one is not None)]
    if not end_ids:
        return dict(files)
    unique = list(dict.fromkeys(ids))
    ends = unique if unique[1:] else unique[0]
    found = {name: to_json({**one, EOS_ID: ends}) for name, one in models.items() if one.get(EOS_ID) != ends}
    tokens = vocabulary(files[TOKENIZER]) if TOKENIZER in files else {}
    end = next((token for token, number in tokens.items() if number == end_ids[0]), None)
    named = {name: json_object(files[name]) for name in (TOKENIZER_CONFIG, TOKENS_MAP) if name in files}
    templates = [content.decode() for name, content in files.items() if "template" in name]
    templates += [str(one.get("chat_template")) for one in named.values()]
    if end is not None and not any(EOS in template for template in templates):
        changed = {name: one for name, one in named.items() if token_text(one.get(EOS)) != end}
        found |= {name: to_json({**one, EOS: end}) for name, one in changed.items()}
    return {**files, **found}


def json_object(content: bytes) -> dict[str, Any]:
    """Return the object in a file; empty if it is none, as another program's file of the same name may be."""
    try:
        return dict(json.loads(content))
    except (TypeError, ValueError):
        return {}


def to_json(data: Mapping[str, Any]) -> bytes:
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
    named = json_object(kept.get(TOKENIZER_CONFIG, b"{}"))
    found = {name: token_text(named.get(name)) for name in ("bos_token", EOS)}
    if TOKENIZER in kept and not found[EOS]:
        ids = vocabulary(kept[TOKENIZER])
        found[EOS] = next((token for token in SEPARATOR_NAMES if token in ids), "")
    return {name: token for name, token in found.items() if token}


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


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Return torch's name of the dtype that a `config.json` gives its weights; None if it says none to export."""
    own = {**config.get("text_config", {}), **config}
    found = own.get("dtype") or own.get("torch_dtype")
    return found if found in EXPORT_DTYPES else None


def context_note(before: int | None, after: int) -> list[str]:
    """Return a note that the context length was raised, if it was."""
    raised = before is not None and after > before
    return [f"{CONTEXT}: {before} → {after}, the tokens of the samples in training"] if raised else []
