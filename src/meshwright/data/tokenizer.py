"""Tokenizers: UTF-8 bytes, without dependencies, and Hugging Face `tokenizer.json` files.

Torch-free. The optional `tokenizers` package is imported only when a `tokenizer.json` is opened.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError

Tokens = NDArray[np.unsignedinteger]

BYTES = "bytes"
SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
"""Common names of the end-of-text token."""

_INVALID_BYTE = 0xFF
_CHUNK_CHARS = 2**20
_SAFE_BREAK = re.compile(r"(?<=\S)\n(?=\S)")


class Tokenizer(Protocol):
    """Protocol for converting text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """The size of the smallest vocabulary that covers every id."""

    @property
    def separator_id(self) -> int | None:
        """The id appended to every document; None if the vocabulary has no such token."""

    def encode(self, text: str) -> Tokens:
        """Encode a text into ids, 1-D, without begin or end tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode several texts, faster than one by one."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Decode ids into text; invalid bytes become replacement characters."""


class ByteTokenizer:
    """UTF-8 byte tokenizer: 256 ids, with the zero byte, which text files do not contain, as the separator."""

    vocab_size: int = 256
    separator_id: int | None = 0

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        # A model with a padded vocabulary can sample ids above 255.
        values = np.asarray(ids, dtype=np.int64)
        values = np.where((values >= 0) & (values < self.vocab_size), values, _INVALID_BYTE)
        return values.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """Tokenizer read from a `tokenizer.json` by the `tokenizers` package.

    Args:
        path: path of the `tokenizer.json`.

    Raises:
        DataError: the package or the file is missing, or the file is not a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        require_tokenizers(path)
        from tokenizers import Tokenizer as Backend

        try:
            self._backend: Any = Backend.from_str(_read(path).decode("utf-8"))
        except DataError:
            raise
        except Exception as error:  # The package raises bare Exception for malformed files.
            raise _not_a_tokenizer(path, error) from None
        # Files often store the truncation and padding settings of their last use; a corpus needs neither.
        self._backend.no_truncation()
        self._backend.no_padding()
        # Special tokens in the text are encoded as text: a document that mentions `<|endoftext|>` does not end there.
        self._backend.encode_special_tokens = True
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise _not_a_tokenizer(path, "its vocabulary is empty")
        self.vocab_size: int = max(vocabulary.values()) + 1
        separators = (vocabulary[name] for name in SEPARATOR_NAMES if name in vocabulary)
        self.separator_id: int | None = next(separators, None)

    def encode(self, text: str) -> Tokens:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode several texts; those over a million characters are processed in chunks (see `_chunks`)."""
        dtype = token_dtype(self.vocab_size)
        chunks = [list(_chunks(text)) for text in texts]
        flat = [chunk for text_chunks in chunks for chunk in text_chunks]
        encoded = iter(self._backend.encode_batch(flat, add_special_tokens=False))
        return [np.concatenate([np.array(next(encoded).ids, dtype=dtype) for _ in parts]) for parts in chunks]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return str(self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer named by `data.tokenizer`: `bytes` or the path of a `tokenizer.json` (`~` is expanded).

    Raises:
        DataError: the file is missing or not a tokenizer, or the `tokenizers` package is missing.
    """
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(_locate(name))


def tokenizer_identity(name: str) -> str:
    """Return a string that identifies the tokenizer's contents, without parsing the file.

    Raises:
        DataError: the file or the `tokenizers` package is missing.
    """
    if name == BYTES:
        return BYTES
    path = _locate(name)
    require_tokenizers(path)
    return f"tokenizer.json {hashlib.sha256(_read(path)).hexdigest()}"


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest of uint8, uint16 and uint32 that holds every id of a vocabulary."""
    if vocab_size <= 2**8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.uint32)


def require_tokenizers(path: Path) -> None:
    """Raise a DataError if the `tokenizers` package, needed to read `path`, is not installed."""
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError(
            "the tokenizers package is not installed",
            where=f"data.tokenizer, {path}",
            rule="reading a tokenizer.json requires the tokenizers package",
            fix='pip install "meshwright[tokenizers]", or data.tokenizer=bytes',
        )


def _chunks(text: str) -> Iterator[str]:
    """Split a long text into chunks of about a million characters, to bound memory and use several cores.

    Splits only after a single newline between two non-blank characters, where GPT-2-style pre-tokenizers (including
    most byte-level ones) split too, so that the ids are the same as for the full text.
    """
    start = 0
    while len(text) - start > _CHUNK_CHARS:
        newline = _SAFE_BREAK.search(text, start + _CHUNK_CHARS)
        if newline is None:
            break
        yield text[start : newline.end()]
        start = newline.end()
    yield text[start:]


def _locate(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if (path / "tokenizer.json").is_file():
        fix = f"data.tokenizer={path / 'tokenizer.json'}"
    else:
        siblings = [str(other) for other in path.parent.glob("*.json")]
        near = difflib.get_close_matches(str(path), siblings, n=1)
        fix = f"data.tokenizer={near[0]}" if near else f"data.tokenizer={BYTES}"
    raise DataError(
        f"{path} is a directory" if path.is_dir() else f"file not found: {path}",
        where=f"data.tokenizer, {name}",
        rule="a tokenizer is bytes or the path of a Hugging Face tokenizer.json",
        fix=fix,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _not_a_tokenizer(path, error.strerror or error) from None


def _not_a_tokenizer(path: Path, reason: object) -> DataError:
    return DataError(
        f"{path} cannot be used: {reason}",
        where=f"data.tokenizer, {path}",
        rule="a tokenizer is bytes or the path of a Hugging Face tokenizer.json",
        fix=f"data.tokenizer={BYTES}, or save the tokenizer again as tokenizer.json",
    )
