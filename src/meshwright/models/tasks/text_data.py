"""Text data of a run, checked against its model and sequence length. Torch-free: checked before processes start."""

from __future__ import annotations

from pathlib import Path

from meshwright.data.images import DIGITS, DIGITS_VIDEO
from meshwright.data.packed_corpus import pack_corpus
from meshwright.data.text_corpus import Corpus, check_vocab, check_windows, open_corpus
from meshwright.data.text_documents import STDLIB
from meshwright.data.token_files import is_token_file
from meshwright.data.tokenizer import open_tokenizer
from meshwright.errors import ConfigError, DataError
from meshwright.models.contract.run_facts import DataFacts, RunFacts
from meshwright.units import counted

PRESETS = {DIGITS: "dit-digits", DIGITS_VIDEO: "dit-digits-video"}
"""Preset to suggest for each image `data.source`."""


def open_text(f: RunFacts, *, vocab_size: int) -> Corpus:
    """Open the text of a run for a model with a vocabulary of `vocab_size` tokens.

    Raises:
        DataError: the text is missing, empty, too short, not text but images, or has ids outside the vocabulary.
        ConfigError: `data.separator` is missing or has no effect, or `train.sample_prompt` has none or can't be used.
    """
    data = f.data
    if data.source in PRESETS and not Path(data.source).exists():
        raise DataError(
            f"{data.source} is image data, but this model trains on text",
            where=f"data.source, {data.source}",
            rule="a text model takes text files or token files",
            fix=f"the preset {PRESETS[data.source]}, or data.source={STDLIB}",
        )
    _check_separator(data)
    if f.sample_prompt is not None:
        _check_prompt(f.sample_prompt, f)
    is_packed = data.packing == "documents"
    corpus = open_corpus(
        data.source,
        tokenizer=data.tokenizer,
        token_dtype=data.token_dtype,
        cache_dir=data.cache_dir,
        with_documents=is_packed,
        separator=data.separator,
        text_field=data.text_field,
    )
    multiple_of = f.axes.tp if f.sequence_parallel else 1
    if is_packed:
        corpus = pack_corpus(corpus, seq_len=f.seq_len, cache_dir=data.cache_dir, multiple_of=multiple_of)
    else:
        check_windows(corpus, f.seq_len, multiple_of=multiple_of)
    check_vocab(corpus, vocab_size)
    return corpus


def _check_separator(data: DataFacts) -> None:
    """Check that a separator is given for packed token files, and only for them."""
    is_tokens, is_packed = is_token_file(data.source), data.packing == "documents"
    if is_tokens and is_packed and data.separator is None:
        raise ConfigError(
            f"data.packing = documents, but {data.source} doesn't say where its documents end",
            where="data.separator",
            rule="a token file has its documents one after the other, each ended by the same token",
            fix="data.separator=<the id of the tokenizer's end of text>, or data.packing=none",
        )
    if data.separator is not None and not (is_tokens and is_packed):
        raise ConfigError(
            f"data.separator = {data.separator} has no effect",
            where="data.separator",
            rule="it applies to packed token files; each text file is a document, whatever its tokens"
            if is_packed
            else "it applies to packed token files, but data.packing is none",
            fix="remove data.separator" + (", or data.packing=documents" if is_tokens else ""),
        )


def _check_prompt(prompt: str, f: RunFacts) -> None:
    """Check that a prompt is used, and that the tokenizer makes at least one and at most `seq_len` tokens of it."""
    is_tokens, seq_len, remove = is_token_file(f.data.source), f.seq_len, "remove train.sample_prompt"
    if is_tokens or not f.sample_tokens:
        what = "train.sample_prompt has no effect"
        cause = "token files have no known tokenizer" if is_tokens else "train.sample_tokens is 0"
        rule = f"a prompt is continued by the text generated at the end, but {cause}"
        fix = remove if is_tokens else f"{remove}, or train.sample_tokens=120"
    else:
        num_tokens = len(open_tokenizer(f.data.tokenizer).encode(prompt))
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
