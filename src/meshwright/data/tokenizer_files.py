"""Files of a tokenizer in Hugging Face's format: the special tokens that they declare, those around a document, and the
files themselves as bytes, to carry them along with weights.

A document is framed as the tokenizer itself frames a text, by the post-processor of its `tokenizer.json`, and it always
ends: with what the post-processor adds, else with the `eos_token` that the files declare. `add_bos_token` and
`add_eos_token` decide nothing, as in transformers 5, which leaves both to the post-processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from meshwright.errors import DataError
from meshwright.units import join_words

BYTES = "bytes"
"""Value of `data.tokenizer` that names no file."""
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENS_MAP = "special_tokens_map.json"
SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
"""Common names of the end-of-text token, for tokenizers that declare none."""
AUTO, NONE = "auto", "none"
"""Values of `data.bos`."""
_END = "eos_token"
_PROBES = 100


@dataclass(frozen=True)
class Framing:
    """Ids before and after the text of each document, and both as text, as in `<s> … </s>`: none for bytes."""

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    text: str = ""


def declared_ends(folder: Path) -> dict[str, str]:
    """Return the end-of-text token that files of a tokenizer's folder declare, by the name of the file.

    Raises:
        DataError: a file is damaged.
    """
    found = {name: token_text(read_json(folder / name).get(_END)) for name in (TOKENIZER_CONFIG, TOKENS_MAP)}
    return {name: text for name, text in found.items() if text}


def frame(backend: Any, path: Path, *, bos: str, separator: int | None) -> Framing:
    """Return how documents are framed.

    Args:
        bos: auto for the beginning that the tokenizer adds, or none.
        separator: id of the token that ends a document; None for what the tokenizer declares.

    Raises:
        DataError: ends are declared that disagree or that the vocabulary lacks, or it lacks the separator.
    """
    begin, end = _added(backend, path)
    begin = () if bos == NONE else begin
    if separator is not None and backend.id_to_token(separator) is None:
        raise _bad(f"data.separator = {separator} is no id of {path}", path, "remove data.separator")
    end = _end(backend, path, end) if separator is None else (separator,)
    words = [*map(backend.id_to_token, begin), "…", *map(backend.id_to_token, end)]
    return Framing(begin, end, " ".join(words) if begin or end else "by nothing: the tokenizer has no end of text")


def _added(backend: Any, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what the tokenizer itself adds before and after a text."""
    if not backend.num_special_tokens_to_add(False):
        return (), ()
    for text in islice(chain("a", backend.get_vocab()), _PROBES):
        with suppress(Exception):  # The package raises bare Exception for what its model can't encode.
            encoding = backend.encode(text)
            first, after = encoding.special_tokens_mask.index(0), encoding.special_tokens_mask[::-1].index(0)
            return tuple(encoding.ids[:first]), tuple(encoding.ids[len(encoding.ids) - after :])
    raise _bad(f"{path} encodes no text", path, "another data.tokenizer")


def _end(backend: Any, path: Path, added: tuple[int, ...]) -> tuple[int, ...]:
    """Return what ends a document: what the tokenizer adds, else what its files declare, else a token of known name."""
    ends: dict[str, int] = {}
    for name, text in declared_ends(path.parent).items():
        if (token := backend.token_to_id(text)) is None:
            fix = "save the tokenizer again, AutoTokenizer.from_pretrained(…).save_pretrained(…), or correct " + name
            raise _bad(f"{name} declares the {_END} {text}, which {path} doesn't have", path, fix)
        ends[f"{text} ({_END} of {name})"] = token
    if added and set(ends.values()) <= set(added):
        return added
    if added:
        ends[f"{backend.id_to_token(added[-1])} (added by {path.name})"] = added[-1]
    elif not ends:
        known = {name: backend.token_to_id(name) for name in SEPARATOR_NAMES}
        ends = {name: token for name, token in known.items() if token is not None}
    tokens = tuple(dict.fromkeys(ends.values()))
    if len(tokens) > 1:
        fix = ", or ".join(f"data.separator={token} for {backend.id_to_token(token)}" for token in tokens)
        raise _bad(f"documents may end with {join_words(list(ends), last='or')}, by {path.parent}", path, fix)
    return tokens


def token_text(value: Any) -> str:
    """Return the text of a special token, which files have as such or in an object; empty if it is none."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of a tokenizer; empty without the file.

    Raises:
        DataError: it has another form.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(found, dict):
        raise _unreadable(path, "it is no object")
    return found


def read_text(path: Path) -> str:
    """Return the text of a file of a tokenizer.

    Raises:
        DataError: it can't be read.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, reason: object) -> DataError:
    return _bad(f"{path} can't be read: {reason}", path, "save the tokenizer again: tokenizer.save_pretrained(…)")


def _bad(what: str, path: Path, fix: str) -> DataError:
    rule = "a tokenizer's files, in Hugging Face's format, say which token ends a document, or data.separator does"
    return DataError(what, where=f"data.tokenizer, {path}", rule=rule, fix=fix)


TOKENIZER_FILES = (
    TOKENIZER, TOKENIZER_CONFIG, TOKENS_MAP, "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "*.tiktoken", "chat_template.*",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Globs of the files that `AutoTokenizer` reads."""


def read_files(folder: Path, globs: Iterable[str]) -> dict[str, bytes]:
    """Read the files of a folder that match one of some globs, by path inside the folder.

    Raises:
        DataError: a file cannot be read.
    """
    paths = sorted(path for glob in globs for path in folder.glob(glob) if path.is_file())
    try:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}",
            where=str(folder),
            rule="files of a tokenizer are copied into checkpoints",
            fix="make the file readable, or move it to another folder",
        ) from None


def tokenizer_files(name: str) -> dict[str, bytes]:
    """Read the tokenizer named by `data.tokenizer`, and the files beside a `tokenizer.json` that belong to it.

    There are none for bytes, or if the file is missing, as it may be when a token file is trained on.

    Raises:
        DataError: a file cannot be read.
    """
    path = Path(name).expanduser()
    path = path / TOKENIZER if path.is_dir() else path
    if name == BYTES or not path.is_file():
        return {}
    if path.name == TOKENIZER:
        return read_files(path.parent, TOKENIZER_FILES)
    return {TOKENIZER: read_files(path.parent, [path.name])[path.name]}


def vocabulary(content: bytes) -> dict[str, int]:
    """Return the ids of all tokens in a `tokenizer.json`, added ones included.

    Raises:
        ValueError: the file has another form.
    """
    try:
        file: dict[str, Any] = json.loads(content)
        pieces = file["model"]["vocab"]
        if isinstance(pieces, list):  # Unigram: pairs of token and score
            pieces = {piece: i for i, (piece, _) in enumerate(pieces)}
        return {**pieces, **{token["content"]: token["id"] for token in file.get("added_tokens") or []}}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it has no vocabulary ({type(error).__name__}: {error})") from None
