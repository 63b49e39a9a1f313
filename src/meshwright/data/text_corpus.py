"""Text corpora as arrays of token ids, opened from `data.source` and `data.tokenizer`.

Text is tokenised once and cached; all ranks and later runs memory-map the same file.

A corpus is read in windows of T + 1 tokens: T inputs and, shifted by one, T targets. Window w covers tokens
w·T … w·T + T, so windows share no input, and the last target of one is the first input of the next. With the ends of
the documents, its documents can be packed instead (see `packed_windows.py`): each record of JSON lines or Parquet is a
document, and each other file, separator included, or each of its two parts if the last tenth of every file is held out;
token files say their separator.

Check a corpus against the length of a run's samples and its model's vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data import cache_file
from meshwright.data.sources.source_text import Use
from meshwright.data.sources.text_source import TextSource, open_source
from meshwright.data.text_documents import STDLIB
from meshwright.data.token_cache import CorpusMetadata, LossMask, SplitDocuments, map_ends, map_mask, map_tokens
from meshwright.data.token_files import is_token_file, open_token_file
from meshwright.data.tokenizer import open_tokenizer, tokenizer_identity, tokenizer_path
from meshwright.data.tokenizer_files import AUTO, BYTES, declared_ends
from meshwright.data.windows import num_windows
from meshwright.errors import DataError
from meshwright.log import get_logger
from meshwright.units import counted, format_count

if TYPE_CHECKING:
    from meshwright.data.packed_windows import PackedSplits

Tokens = NDArray[np.integer]

# Increment when the same files would give different tokens: hold-out rule, framing, text detection.
_FORMAT = 2

_log = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation split of a tokenised corpus.

    Args:
        vocab_size: size of the smallest vocabulary that covers every id.
        validation_bytes_per_token: average bytes of text per token of `validation`, counting one byte per end of a
            document and none per beginning, which packed documents don't predict; converts nats per token to bits per
            byte. None for token files, whose text is unknown, and for conversations, of which only some tokens count.
        fingerprint: hex SHA-256 of the ids of both splits, and of the documents if they are known; the same on every
            machine.
        packed: windows of packed documents of both splits; None unless `pack_corpus` made them.
        validation_source: `data.validation_source`, if that is where `validation` is from.
        is_text: whether `validation` is of the tokenizer; false for token files.
        train_mask: loss mask of `train`; None if all its tokens count.
        conversations: where `train` was read from, to read its conversations again; None without such.
    """

    source: str
    description: str
    train: Tokens = field(repr=False)
    validation: Tokens = field(repr=False)
    vocab_size: int
    validation_bytes_per_token: float | None
    fingerprint: str
    train_documents: SplitDocuments | None = None
    validation_documents: SplitDocuments | None = None
    packed: PackedSplits | None = None
    validation_source: str | None = None
    is_text: bool = True
    train_mask: LossMask | None = None
    validation_mask: LossMask | None = None
    conversations: Conversations | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Conversations:
    """Training documents of a source with conversations, as they are read."""

    source: TextSource
    day: date


def open_corpus(
    source: str,
    *,
    tokenizer: str,
    token_dtype: str,
    cache_dir: str | None,
    with_documents: bool = False,
    separator: int | None = None,
    bos: str = AUTO,
    text_field: str | None = None,
    chat_field: str | None = None,
    use: Use = Use.SPLIT,
) -> Corpus:
    """Open the corpus named by `data.source`, tokenising and caching it if necessary.

    Args:
        source: `stdlib` (the .py files of this Python's standard library), a `.npy` or `.bin` token file, or else a
            glob of files of UTF-8 text, JSON lines or Parquet, the folder of a saved dataset, or
            `package.module:Source`. `text_documents.py`, `sources/` and `token_files.py` define the held-out part.
        tokenizer: `data.tokenizer`; ignored for token files.
        token_dtype: element type of a `.bin`.
        cache_dir: directory for tokenised text; `~/.cache/meshwright` if None.
        separator: last token of each document: of a token file, needed to find them; of text, in place of what the
            tokenizer declares.
        text_field, chat_field: field that is the text, or else the conversation, of each record.
        use: which split has the texts; a tenth is held out, or the other is empty.

    Raises:
        DataError: the source or the tokenizer is missing, unreadable, malformed or empty, or a field is missing or has
            no effect.
    """
    record = None
    if text_field is not None or chat_field is not None:
        from meshwright.data.sources.record_field import no_effect, record_field

        record = record_field(text_field=text_field, chat_field=chat_field, tokenizer=tokenizer)
    if is_token_file(source):
        if record is not None:
            raise no_effect(record.name, source, key=record.key)
        assert (separator is not None) == with_documents, "documents of a token file are found by their separator"
        tokens, metadata, path = open_token_file(
            source, token_dtype=token_dtype, cache_dir=cache_dir, separator=separator
        )
        metadata = metadata.used(use)
        title, notes = os.path.basename(source), []
        corpus = replace(_corpus(source, tokens, metadata), is_text=False)
    else:
        found = open_source(source, record).used(use)
        path, metadata = _open_text(
            source, found, tokenizer=tokenizer, bos=bos, separator=separator, cache_dir=cache_dir,
            with_documents=with_documents,
        )  # fmt: skip
        title, notes = found.title, _notes(source, found, metadata)
        corpus = _with_mask(_corpus(source, map_tokens(path, metadata), metadata), path, metadata, found)
    corpus = _with_documents(corpus, path, metadata) if with_documents else corpus
    corpus = _without_other_split(corpus, use) if use is not Use.SPLIT else corpus
    is_bytes = metadata.validation_text_bytes is not None and tokenizer == BYTES
    return replace(corpus, description="\n  ".join([f"{title}, {_sizes(corpus, is_bytes)}", *notes]))


def _corpus(source: str, tokens: Tokens, metadata: CorpusMetadata) -> Corpus:
    """Return the corpus of both splits, without its documents and description."""
    text_bytes = metadata.validation_text_bytes
    return Corpus(
        source=source,
        description="",
        train=tokens[: metadata.num_train],
        validation=tokens[metadata.num_train :],
        vocab_size=metadata.vocab_size,
        validation_bytes_per_token=None if text_bytes is None else text_bytes / metadata.num_validation,
        fingerprint=metadata.fingerprint,
    )


def _with_mask(corpus: Corpus, path: Path, metadata: CorpusMetadata, found: TextSource) -> Corpus:
    """Add the loss mask of a source that may have conversations."""
    mask = map_mask(path, metadata)
    if mask is None:
        return corpus
    identity = f"loss mask {corpus.fingerprint} {metadata.mask_fingerprint}"
    return replace(
        corpus,
        fingerprint=hashlib.sha256(identity.encode("ascii")).hexdigest(),
        train_mask=mask,
        validation_mask=replace(mask, start=metadata.num_train),
        conversations=Conversations(found, date.fromisoformat(metadata.chat_day)),
    )


def _with_documents(corpus: Corpus, path: Path, metadata: CorpusMetadata) -> Corpus:
    from meshwright.data.packed_windows import packed_fingerprint

    ends = map_ends(path, metadata)
    fingerprint = packed_fingerprint(corpus.fingerprint, metadata.ends_fingerprint)
    bytes_per_token = corpus.validation_bytes_per_token
    if metadata.has_begin and bytes_per_token is not None:
        # No document predicts its first token, which has no bytes, so all bytes are of the others.
        bytes_per_token /= 1 - metadata.num_validation_documents / metadata.num_validation
    return replace(
        corpus,
        fingerprint=fingerprint,
        validation_bytes_per_token=bytes_per_token,
        train_documents=SplitDocuments(ends[: metadata.num_train_documents], 0, fingerprint),
        validation_documents=SplitDocuments(ends[metadata.num_train_documents :], metadata.num_train, fingerprint),
    )


def _without_other_split(corpus: Corpus, use: Use) -> Corpus:
    """Leave empty the split that a source used whole doesn't have (a text's cache has a placeholder there)."""
    if use is Use.TRAIN:
        return replace(
            corpus, validation=corpus.validation[:0], validation_documents=None, validation_bytes_per_token=None
        )
    return replace(corpus, train=corpus.train[:0], train_documents=None)


def _open_text(
    source: str, found: TextSource, *, tokenizer: str, bos: str, separator: int | None, cache_dir: str | None,
    with_documents: bool,
) -> tuple[Path, CorpusMetadata]:  # fmt: skip
    more, listing = found.key
    identity = [_FORMAT, tokenizer_identity(tokenizer), *more]
    if tokenizer != BYTES:
        identity.append({"bos": bos, "separator": separator, "ends": declared_ends(tokenizer_path(tokenizer).parent)})
    key = hashlib.sha256(json.dumps([identity, listing]).encode("ascii")).hexdigest()[:32]

    name = f"{STDLIB if source == STDLIB else 'text'}-{key}.tokens"

    def build(file: BinaryIO) -> CorpusMetadata:
        _log.info("tokenising %s of %s with %s", found.size, source, tokenizer)
        opened = open_tokenizer(tokenizer, bos=bos, separator=separator)
        # The cache file is written under another name in the folder where it will be.
        parts = cache_file.parts_folder(Path(file.name).with_name(name))
        from meshwright.data.tokenise import write_corpus

        return write_corpus(file, found, opened, source=source, parts=parts)

    path, metadata = cache_file.open_or_build(
        name,
        CorpusMetadata,
        cache_dir=cache_dir,
        build=build,
        # Files of earlier versions have no ends of documents.
        is_usable=lambda metadata: metadata.has_documents or not with_documents,
    )
    # Another process that still makes the corpus goes on without its parts.
    shutil.rmtree(cache_file.parts_folder(path), ignore_errors=True)
    return path, metadata


def _notes(source: str, found: TextSource, metadata: CorpusMetadata) -> list[str]:
    """Return how the documents of a source are framed, and what they lack or depend on: part of its description, which
    a run shows once, whereas every process that opens it would log it."""
    notes = [f"documents framed {metadata.framing}"] if metadata.framing else []
    if found.chat is not None and found.chat.uses_date:
        notes.append(f"the chat template may write the date into conversations: theirs is {metadata.chat_day}")
    if metadata.num_skipped and source != STDLIB:
        notes.append(f"skipped {metadata.num_skipped} of the {found.size}: not UTF-8, or contain zero bytes")
    if metadata.num_empty:
        notes.append(f"left out {counted(metadata.num_empty, 'document')}: their text is empty")
    return notes


def _sizes(corpus: Corpus, is_bytes: bool) -> str:
    """Return the sizes of the splits that have tokens, as in `25.6 MB train / 2.8 MB validation`."""
    sizes = {"train": len(corpus.train), "validation": len(corpus.validation)}
    amount = _bytes if is_bytes else lambda size: f"{format_count(size)} tokens"
    return " / ".join(f"{amount(size)} {name}" for name, size in sizes.items() if size)


def _bytes(count: int) -> str:
    """Format bytes in decimal units, as in `28.3 MB`."""
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count} B"


class SplitSource(NamedTuple):
    """Source of a split: its key, and what the key names."""

    key: str
    name: str


def split_source(corpus: Corpus, split: str) -> SplitSource:
    """Return the source of the `training` or `validation` split."""
    if split == "validation" and corpus.validation_source is not None:
        return SplitSource("data.validation_source", corpus.validation_source)
    return SplitSource("data.source", corpus.source)


def check_windows(corpus: Corpus, seq_len: int, *, multiple_of: int = 1) -> None:
    """Check that both splits of a corpus hold at least one window.

    Args:
        multiple_of: divisor required of the suggested `seq_len`, for example the number of ranks that shard it.

    Raises:
        DataError: a split is too short; the fix names the largest `train.seq_len` that works.
    """
    parts = {"training": corpus.train, "validation": corpus.validation}
    name, shortest = min(parts.items(), key=lambda item: len(item[1]))
    if num_windows(shortest, seq_len):
        return
    largest, source = (len(shortest) - 1) // multiple_of * multiple_of, split_source(corpus, name)
    raise DataError(
        f"train.seq_len = {seq_len} is longer than the {name} split, which has {counted(len(shortest), 'token')}",
        where=f"train.seq_len; {source.key}, {source.name}",
        rule="the training and validation splits each hold at least one sample of seq_len + 1 tokens",
        fix=f"train.seq_len={largest}, or a larger {source.key}" if largest > 0 else f"a larger {source.key}",
    )


def check_vocab(corpus: Corpus, vocab_size: int, *, is_key: bool = True) -> None:
    """Check that a model's vocabulary covers every id of a corpus.

    Args:
        is_key: whether the vocabulary is the key `model.vocab_size`, and not the size of a given model.

    Raises:
        DataError: the corpus has ids outside the vocabulary.
    """
    if corpus.vocab_size > vocab_size and not is_key:
        raise DataError(
            f"the corpus has ids up to {corpus.vocab_size - 1}, but the model has a vocabulary of {vocab_size}",
            where=f"data.tokenizer; data.source, {corpus.source}",
            rule="every token id is less than the size of the model's vocabulary",
            fix="data.tokenizer=<that of the model> (bytes for a model type, which is small), or a model with "
            f"{corpus.vocab_size} tokens (of transformers: resize_token_embeddings({corpus.vocab_size}))",
        )
    if corpus.vocab_size > vocab_size:
        raise DataError(
            f"model.vocab_size = {vocab_size} is too small: the corpus has ids up to {corpus.vocab_size - 1}",
            where=f"model.vocab_size; data.source, {corpus.source}",
            rule="every token id is less than model.vocab_size",
            fix=f"model.vocab_size={corpus.vocab_size}, or any larger one",
        )
