"""Files of a tokenizer in Hugging Face's format, as bytes: to carry them along with weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.data.tokenise.special_tokens import TOKENIZER_CONFIG as TOKENIZER_CONFIG
from meshwright.data.tokenise.special_tokens import TOKENS_MAP
from meshwright.data.tokenizer import BYTES
from meshwright.data.tokenizer import TOKENIZER as TOKENIZER
from meshwright.errors import DataError

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
