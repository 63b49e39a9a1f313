"""Tokenizers: UTF-8 bytes, without dependencies, and Hugging Face `tokenizer.json` files.

The optional `tokenizers` package is imported only when a `tokenizer.json` is opened.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.tokenizer_files import AUTO, BYTES, TOKENIZER, Framing, frame
from meshwright.errors import DataError
from meshwright.settings.import_object import download_fix

Tokens = NDArray[np.unsignedinteger]

RULE = "a tokenizer is bytes, or the path of a Hugging Face tokenizer.json or of its folder"

_INVALID_BYTE = 0xFF
_PIECE_CHARS = 2**20
_SAFE_BREAK = re.compile(r"(?<=\S)\n(?=\S)")


class Tokenizer(Protocol):
    """Protocol for converting text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """The size of the smallest vocabulary that covers every id."""

    @property
    def framing(self) -> Framing:
        """The ids before and after every document.

        Raises:
            DataError: it isn't known what ends a document.
        """

    def encode(self, text: str) -> Tokens:
        """Encode a text into ids, 1-D, without begin or end tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode several texts, faster than one by one."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Decode ids into text; invalid bytes become replacement characters."""


class ByteTokenizer:
    """UTF-8 byte tokenizer: 256 ids, with the zero byte, which text files do not contain, as the separator."""

    vocab_size: int = 256
    framing = Framing(end=(0,))

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

    Raises:
        DataError: the package or the file is missing, or the file is not a tokenizer.
    """

    def __init__(self, path: Path, *, bos: str = AUTO, separator: int | None = None) -> None:
        self._path, self._bos, self._separator = path, bos, separator
        self._backend = open_backend(path)
        # Special tokens in the text are encoded as text: a document that mentions `<|endoftext|>` does not end there.
        self._backend.encode_special_tokens = True
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise _not_a_tokenizer(path, "its vocabulary is empty")
        self.vocab_size: int = max(vocabulary.values()) + 1

    @cached_property
    def framing(self) -> Framing:
        return frame(self._backend, self._path, bos=self._bos, separator=self._separator)

    def encode(self, text: str) -> Tokens:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode several texts; those over a million characters in pieces (see `pieces`).

        Raises:
            DataError: the tokenizer fails, for example since a word is unknown and it has no token for such.
        """
        dtype = token_dtype(self.vocab_size)
        cut = [list(pieces([text])) for text in texts]
        flat = [piece for text_pieces in cut for piece in text_pieces]
        try:
            encoded = iter(self._backend.encode_batch_fast(flat, add_special_tokens=False))
        except Exception as error:  # The package raises bare Exception for what its model can't encode.
            raise _not_a_tokenizer(self._path, f"it fails on a text: {error}") from None
        return [np.concatenate([np.array(next(encoded).ids, dtype=dtype) for _ in part]) for part in cut]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return str(self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False))


def open_tokenizer(name: str, *, bos: str = AUTO, separator: int | None = None) -> Tokenizer:
    """Open the tokenizer named by `data.tokenizer`: `bytes`, or a `tokenizer.json` or its folder (`~` is expanded).

    `bos` and `separator` decide how documents are framed (see `frame`).

    Raises:
        DataError: the file is missing or not a tokenizer, or the `tokenizers` package is missing.
    """
    if name == BYTES:
        return ByteTokenizer()
    return HuggingFaceTokenizer(tokenizer_path(name), bos=bos, separator=separator)


def open_backend(path: Path) -> Any:
    """Open a `tokenizer.json` with the `tokenizers` package.

    Raises:
        DataError: the package or the file is missing, or the file is not a tokenizer.
    """
    require_tokenizers(path)
    from tokenizers import Tokenizer as Backend

    try:
        backend: Any = Backend.from_str(_read(path).decode("utf-8"))
    except DataError:
        raise
    except Exception as error:  # The package raises bare Exception for malformed files.
        raise _not_a_tokenizer(path, error) from None
    # Files often store the truncation and padding settings of their last use; a corpus needs neither.
    backend.no_truncation()
    backend.no_padding()
    return backend


def tokenizer_identity(name: str) -> str:
    """Return a string that identifies the tokenizer's contents, without parsing the file.

    Raises:
        DataError: the file or the `tokenizers` package is missing.
    """
    if name == BYTES:
        return BYTES
    path = tokenizer_path(name)
    require_tokenizers(path)
    return f"tokenizer.json {hashlib.sha256(_read(path)).hexdigest()}"


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest of uint8, uint16 and uint32 that holds every id of a vocabulary."""
    if vocab_size <= 2**8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.uint32)


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """Cut a long text, given as consecutive texts of any size, into pieces of about a million characters.

    Pieces bound memory and use several cores. Cuts only after a single newline between two non-blank characters, where
    GPT-2-style pre-tokenizers (including most byte-level ones) cut too, so that the ids are the same as for the full
    text. Where the given texts begin and end does not matter.
    """
    held, start = "", 0
    for text in texts:
        if start:
            held, start = held[start:], 0
        first = len(held) - 1  # Before it there is no place to cut, or it would have been found.
        held += text
        while len(held) - start > _PIECE_CHARS:
            newline = _SAFE_BREAK.search(held, max(start + _PIECE_CHARS, first))
            if newline is None:
                break
            yield held[start : newline.end()]
            start = newline.end()
    yield held[start:]


def require_tokenizers(path: Path) -> None:
    """Raise a DataError if the `tokenizers` package, needed to read `path`, is not installed."""
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError(
            "the tokenizers package is not installed",
            where=f"data.tokenizer, {path}",
            rule="reading a tokenizer.json requires the tokenizers package",
            fix="pip install tokenizers, or data.tokenizer=bytes",
        )


def tokenizer_path(name: str) -> Path:
    """Return the path of the `tokenizer.json` that `data.tokenizer` names: itself, or its folder (`~` is expanded).

    Raises:
        DataError: there is none.
    """
    given = Path(name).expanduser()
    path = given / TOKENIZER if given.is_dir() else given
    if path.is_file():
        return path
    siblings = [str(other) for other in given.parent.glob("*.json")]
    near = difflib.get_close_matches(str(given), siblings, n=1)
    raise DataError(
        f"{given} is a directory without {TOKENIZER}" if given.is_dir() else f"file not found: {path}",
        where=f"data.tokenizer, {name}",
        rule=RULE,
        fix=download_fix(name, "data.tokenizer={}") or f"data.tokenizer={near[0] if near else BYTES}",
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
        rule=RULE,
        fix=f"data.tokenizer={BYTES}, or save the tokenizer again as tokenizer.json",
    )
