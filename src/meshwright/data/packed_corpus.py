"""Both splits of a corpus with their documents packed into windows. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from meshwright.data.corpus_checks import split_source
from meshwright.data.packed_windows import PackedSplits, open_packed
from meshwright.data.text_corpus import Corpus
from meshwright.errors import DataError
from meshwright.units import counted


def pack_corpus(corpus: Corpus, *, seq_len: int, cache_dir: str | None, multiple_of: int = 1) -> Corpus:
    """Return the corpus with its documents packed into windows of `seq_len` tokens.

    Args:
        corpus: a corpus opened with its documents.
        seq_len: tokens in a window.
        cache_dir: directory of the cached index.
        multiple_of: divisor required of the suggested `seq_len`, for example the number of ranks that shard it.

    Raises:
        DataError: a split has fewer targets than a window; the fix names the largest `train.seq_len` that works.
    """
    assert corpus.train_documents is not None and corpus.validation_documents is not None, "open it with its documents"
    train, validation = (
        open_packed(tokens, documents, seq_len=seq_len, fingerprint=documents.fingerprint, cache_dir=cache_dir)
        for tokens, documents in (
            (corpus.train, corpus.train_documents),
            (corpus.validation, corpus.validation_documents),
        )
    )
    alone = train.num_targets / max(1, len(train.pieces) * seq_len)
    # Says what packing is worth: padding costs as much as tokens.
    description = (
        f"{corpus.description}\n  documents packed: {train.fill:.1%} of the tokens in samples have a target, "
        f"{alone:.1%} with a document per sample"
    )
    packed = replace(corpus, description=description, packed=PackedSplits(train, validation))
    _check(packed, train.num_targets, validation.num_targets, seq_len=seq_len, multiple_of=multiple_of)
    return packed


def packed_splits(corpus: Corpus) -> PackedSplits:
    """Return the windows of packed documents of both splits of a packed corpus."""
    assert corpus.packed is not None, "the corpus is not packed"
    return corpus.packed


def _check(corpus: Corpus, num_train: int, num_validation: int, *, seq_len: int, multiple_of: int) -> None:
    """Check that both splits have enough targets to fill a window."""
    fewest, name = min((num_train, "training"), (num_validation, "validation"))
    if fewest >= seq_len:
        return
    largest, source = fewest // multiple_of * multiple_of, split_source(corpus, name)
    raise DataError(
        f"train.seq_len = {seq_len} is longer than the {name} split, whose documents have {counted(fewest, 'target')}",
        where=f"train.seq_len; {source.key}, {source.name}",
        rule="with data.packing = documents, the training and validation splits each fill at least one sample; each "
        "token of a document but the first is a target",
        fix=f"train.seq_len={largest}, or a larger {source.key}" if largest else f"a larger {source.key}",
    )
