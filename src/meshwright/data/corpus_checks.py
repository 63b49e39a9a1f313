"""Check a corpus against the length of a run's samples and its model's vocabulary."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.data.text_corpus import Corpus
from meshwright.data.token_windows import num_windows
from meshwright.errors import DataError
from meshwright.units import counted


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
        corpus: the corpus to check.
        seq_len: inputs per window.
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
        corpus: the corpus to check.
        vocab_size: tokens of the model's vocabulary.
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
