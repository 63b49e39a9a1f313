"""Write the tokens of a corpus of texts, and the ends of its documents, as a cache file."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshwright.data.chats.chat_format import ChatFormat
from meshwright.data.corpus_fingerprint import Fingerprint
from meshwright.data.document_ends import EndsWriter
from meshwright.data.loss_mask import MaskWriter
from meshwright.data.sources.source_text import LeftOut, SourceText
from meshwright.data.sources.text_source import TextSource
from meshwright.data.text_documents import STDLIB
from meshwright.data.token_cache import CorpusMetadata
from meshwright.data.tokenise.encode import Encoded, batches, encode_in_order
from meshwright.data.tokenise.parts import Parts
from meshwright.data.tokenise.special_tokens import Framing
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, token_dtype
from meshwright.errors import DataError
from meshwright.log import get_logger
from meshwright.units import counted

SPLITS = ("training", "validation")

_log = get_logger(__name__)


def write_corpus(
    file: BinaryIO, found: TextSource, tokenizer: Tokenizer, *, source: str, parts: Path
) -> CorpusMetadata:
    """Write the tokens of all documents, training split first, each text framed by the tokenizer's begin and end, and
    then the loss mask, if there may be conversations, and the documents' ends.

    Args:
        file: file to write to.
        found: the texts.
        tokenizer: the tokenizer.
        source: `data.source`, for messages.
        parts: folder in which finished parts are kept until the corpus is complete.

    Raises:
        DataError: a split is empty, a text can't be read, or the tokenizer fails.
    """
    dtype = token_dtype(tokenizer.vocab_size).newbyteorder("<")
    fingerprint, is_bytes = Fingerprint(dtype), isinstance(tokenizer, ByteTokenizer)
    left_out = LeftOut()
    counts, num_documents = list[int](), list[int]()
    ends = array("Q")  # Of all documents: far smaller than the list of files.
    mask = None if found.chat is None else MaskWriter()
    for split, texts in zip(SPLITS, found.splits(left_out), strict=True):
        start = sum(counts)
        counts.append(0)
        text_bytes = 0  # Reset per split: the value of the last one, validation, is reported.
        for encoded in _encoded(texts, tokenizer, None if is_bytes else Parts(parts, split)):
            file.write(encoded.tokens.data)
            fingerprint.update(encoded.tokens)
            ends.frombytes((encoded.ends + np.uint64(start + counts[-1])).tobytes())
            counts[-1] += len(encoded.tokens)
            if mask is not None:
                mask.add(encoded.loss_mask())
            text_bytes += encoded.text_bytes
        num_documents.append(len(ends) - sum(num_documents))
    _check_contents(counts, left_out, found, source)
    mask_bytes, mask_fingerprint = (0, "") if mask is None else mask.write(file)
    writer = EndsWriter(file)
    writer.write(np.frombuffer(ends, dtype=np.uint64))
    num_train, num_validation = counts
    framing = Framing() if found.chat is not None else tokenizer.framing
    metadata = CorpusMetadata(
        dtype=dtype.str,
        num_train=num_train,
        num_validation=num_validation,
        payload_bytes=sum(counts) * dtype.itemsize + mask_bytes + writer.num_bytes,
        vocab_size=tokenizer.vocab_size,
        validation_text_bytes=text_bytes,
        num_skipped=len(left_out.files),
        num_empty=left_out.empty.count,
        fingerprint=fingerprint.hexdigest(num_train=num_train),
        num_train_documents=num_documents[0],
        num_validation_documents=num_documents[1],
        ends_fingerprint=writer.fingerprint(),
        mask_bytes=mask_bytes,
        mask_fingerprint=mask_fingerprint,
        framing=framing.text,
        has_begin=bool(framing.begin),
    )
    return metadata if found.chat is None else _of_conversations(metadata, found.chat)


def _of_conversations(metadata: CorpusMetadata, chat: ChatFormat) -> CorpusMetadata:
    """Add the day; and leave out the bytes of the text, since the loss is of some of its tokens only."""
    return replace(metadata, chat_day=chat.today.isoformat(), validation_text_bytes=None)


def _encoded(texts: Iterable[SourceText], tokenizer: Tokenizer, parts: Parts | None) -> Iterator[Encoded]:
    """Encode a split. Bytes need no parts: to read the texts again, as parts do too, is all the work that there is."""
    return encode_in_order(batches(texts), tokenizer) if parts is None else parts.encode(batches(texts), tokenizer)


def _check_contents(counts: list[int], left_out: LeftOut, found: TextSource, source: str) -> None:
    """Check that both splits have tokens, and say where the first empty text is."""
    for split, num_tokens in zip(SPLITS, counts, strict=True):
        if not num_tokens:
            raise DataError(
                f"the {split} split of {source} is empty: it has {found.size}, "
                f"{counted(len(left_out.files), 'file')} not UTF-8 text",
                where=f"data.source, {source}",
                rule="a tenth of the text is held out for validation, and neither split is empty",
                fix=left_out.fix(f"a source with more text, or data.source={STDLIB}"),
            )
    if left_out.empty.count:
        _log.warning("the first document without text is %s", left_out.empty.first)
