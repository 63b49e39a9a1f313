"""Text data of a run, checked against its model and sequence length. Torch-free: checked before processes start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from meshwright.data.mixtures.entries import shares
from meshwright.data.mixtures.mixture import (
    Mixture,
    Text,
    check_exhaustion,
    describe,
    train_order,
    train_sizes,
    with_validation,
)
from meshwright.data.sources.source_text import Use
from meshwright.data.text_corpus import Corpus, check_vocab, check_windows, open_corpus
from meshwright.data.text_documents import is_own, list_documents
from meshwright.data.token_files import is_token_file
from meshwright.data.tokenizer import Tokenizer, open_tokenizer
from meshwright.data.tokenizer_files import BYTES
from meshwright.errors import ConfigError, DataError
from meshwright.models.contract.family import DataConfig, RunFacts
from meshwright.models.tasks.text_sources import RunSource, all_sources, resolved_sources
from meshwright.units import counted


def open_text(f: RunFacts, *, vocab_size: int) -> Text:
    """Open the text of a run for a model with a vocabulary of `vocab_size` tokens.

    Raises:
        DataError: a text is missing, empty, too short, not text but images, or has ids outside the vocabulary; two
            sources have a file in common; or a source runs out before the run ends, and `data.when_exhausted` is end.
        ConfigError: `data.mixture` is malformed; or `data.separator` is missing or has no effect, or
            `train.sample_prompt` has none or can't be used.
    """
    data = f.data
    sources = resolved_sources(data)
    _check_separator(data, sources)
    if f.sample_prompt is not None:
        _check_prompt(f.sample_prompt, f)
    opened = [_open(one, f) for one in sources]
    if f.trains:
        check_overlaps(sources)
    _check_same_tokens(sources, opened, data)
    more = ""
    if data.validation_source is not None:
        *training, validation = opened
        opened = [with_validation(corpus, validation) for corpus in training]
        more = f"\n  {validation.description}"
    found = [_prepared(one, corpus, f, vocab_size) for one, corpus in zip(sources, opened, strict=False)]
    text = _joined(sources, found, f)
    return replace(text, description=f"{text.description}{more}")


def _open(one: RunSource, f: RunFacts) -> Corpus:
    """Open the corpus of a source, as it is used."""
    data, is_packed = f.data, f.data.packing == "documents"
    with one.named():
        return open_corpus(
            one.source,
            tokenizer=data.tokenizer,
            token_dtype=data.token_dtype,
            cache_dir=data.cache_dir,
            with_documents=is_packed,
            separator=data.separator if is_packed or not is_token_file(one.source) else None,
            bos=data.bos,
            text_field=one.text_field,
            chat_field=one.chat_field,
            use=one.use,
        )


def _prepared(one: RunSource, corpus: Corpus, f: RunFacts, vocab_size: int) -> Corpus:
    """Pack a corpus if its documents are packed, and check its length and ids."""
    multiple_of = f.axes.tp if f.sequence_parallel else 1
    with one.named():
        if f.data.packing == "documents":
            from meshwright.data.packed_corpus import pack_corpus

            corpus = pack_corpus(corpus, seq_len=f.seq_len, cache_dir=f.data.cache_dir, multiple_of=multiple_of)
        else:
            check_windows(corpus, f.seq_len, multiple_of=multiple_of)
        check_vocab(corpus, vocab_size, is_key="vocab_size" in type(f.sections["model"]).model_fields)
    return corpus


def _joined(sources: tuple[RunSource, ...], found: list[Corpus], f: RunFacts) -> Text:
    """Return the text of a run, given its prepared corpora."""
    entries = [one.entry for one in sources if one.entry is not None]
    text: Text = Mixture(tuple(found), shares(entries), "") if entries else found[0]
    order = train_order(text, train_sizes(text, f.seq_len), f.seed)
    if f.data.when_exhausted == "end":
        check_exhaustion(text, order, steps=f.steps, global_batch=f.global_batch)
    if isinstance(text, Mixture):
        text = replace(text, description=describe(text, order, num_samples=f.steps * f.global_batch))
    note = "\n  each batch repeats samples: train.global_batch = {}, and {} has {}"
    notes = (
        note.format(f.global_batch, corpus.source, part.num_windows) if number > part.num_windows else ""
        for corpus, part, number in zip(found, order.parts, order.num_read(f.global_batch), strict=True)
    )
    return replace(text, description=text.description + "".join(notes))


def _check_same_tokens(sources: tuple[RunSource, ...], opened: list[Corpus], data: DataConfig) -> None:
    """Check that the ids of token files beside text are those of the tokenizer."""
    is_tokens = [is_token_file(one.source) for one in sources]
    if all(is_tokens) or not any(is_tokens):
        return
    vocab_size = open_tokenizer(data.tokenizer).vocab_size
    for one, corpus, is_file in zip(sources, opened, is_tokens, strict=True):
        if is_file and corpus.vocab_size > vocab_size:
            raise DataError(
                f"{one.source} has ids up to {corpus.vocab_size - 1}, but data.tokenizer = {data.tokenizer} has "
                f"{vocab_size} tokens",
                where=f"data.tokenizer; {one.key}, {one.source}",
                rule="token files and text of one run are of the same tokenizer",
                fix="data.tokenizer=<the tokenizer.json that made the token file>",
            )


def _check_separator(data: DataConfig, sources: tuple[RunSource, ...]) -> None:
    """Check that a separator is given for packed token files, and only for them or for text with a tokenizer."""
    files = [one.source for one in sources if is_token_file(one.source)]
    is_packed = data.packing == "documents"
    is_tokens = bool(files)
    if is_tokens and is_packed and data.separator is None:
        raise ConfigError(
            f"data.packing = documents, but {files[0]} doesn't say where its documents end",
            where="data.separator",
            rule="a token file has its documents one after the other, each ended by the same token",
            fix="data.separator=<the id of the tokenizer's end of text>, or data.packing=none",
        )
    has_texts = any(one.chat_field is None and not is_token_file(one.source) for one in sources)
    is_text = has_texts and data.tokenizer != BYTES
    if data.separator is not None and not (is_tokens and is_packed) and not is_text:
        raise ConfigError(
            f"data.separator = {data.separator} has no effect",
            where="data.separator",
            rule="it applies to packed token files, and to text with a tokenizer.json"
            + ("" if is_packed else "; data.packing is none"),
            fix="remove data.separator" + (", or data.packing=documents" if is_tokens else ""),
        )


def encode_prompt(prompt: str, data: DataConfig) -> tuple[Tokenizer, list[int]]:
    """Return the tokenizer and the ids of a prompt, which begins as documents do in training; none if it has none."""
    tokenizer = open_tokenizer(data.tokenizer, bos=data.bos, separator=data.separator)
    ids = tokenizer.encode(prompt).tolist()
    begin = tokenizer.framing.begin if data.chat_field is None else ()
    return tokenizer, [*begin, *ids] if ids else []


def _check_prompt(prompt: str, f: RunFacts) -> None:
    """Check that a prompt is used, and that the tokenizer makes at least one and at most `seq_len` tokens of it."""
    # Text is generated if that of the validation split is known.
    is_tokens = any(is_token_file(one.source) for one in all_sources(f.data) if one.use is not Use.TRAIN)
    seq_len, remove = f.seq_len, "remove train.sample_prompt"
    if is_tokens or not f.sample_tokens:
        what = "train.sample_prompt has no effect"
        cause = "token files have no known tokenizer" if is_tokens else "train.sample_tokens is 0"
        rule = f"a prompt is continued by the text generated at the end, but {cause}"
        fix = remove if is_tokens else f"{remove}, or train.sample_tokens=120"
    else:
        num_tokens = len(encode_prompt(prompt, f.data)[1])
        if 0 < num_tokens <= seq_len:
            return
        what = f"train.sample_prompt has {counted(num_tokens, 'token')}, but train.seq_len = {seq_len}"
        rule, fix = "a prompt fits into one sample", f"a shorter prompt, or train.seq_len={num_tokens}"
        if num_tokens == 0:
            what = f"train.sample_prompt = {prompt!r} can't be tokenized"
            rule, fix = (
                f"a prompt is text that data.tokenizer = {f.data.tokenizer} encodes",
                f"{remove}, or another one",
            )
    raise ConfigError(what, where="train.sample_prompt", rule=rule, fix=fix)


def check_overlaps(sources: Sequence[RunSource]) -> None:
    """Check the sources of a run, which exist, pair by pair.

    Raises:
        DataError: two of them have a file in common; entries of a mixture may have one if they read different fields.
    """
    files = {one: _files(one.source) for one in sources} if len(sources) > 1 else {}
    for one, other in combinations(files, 2):
        common = sorted(files[one] & files[other])
        is_validation = other.use is Use.VALIDATION
        if not common or (not is_validation and one.text_field != other.text_field):
            continue
        more = f" and {counted(len(common) - 1, 'more file')}" if len(common) > 1 else ""
        if is_validation:
            what = f"{common[0]}{more} would be trained on, as {one.source}, and validated with"
            rule, fix = "what a run validates with is not trained on", f"{other.key} and {one.key} without common files"
        else:
            what = f"{common[0]}{more} would be read by {one.source} and by {other.source}"
            rule, fix = (
                "each file is of one source of a mixture, unless they read different fields",
                "one entry for both",
            )
        raise DataError(what, where=f"{other.key}, {other.source}", rule=rule, fix=fix)


def _files(source: str) -> frozenset[str]:
    """Return what a source reads: files by their paths, without links, or its name."""
    if is_own(source):
        return frozenset({source})
    if is_token_file(source) or os.path.isdir(source):
        return frozenset({os.path.realpath(source)})
    return frozenset(os.path.realpath(document.path) for document in list_documents(source))
