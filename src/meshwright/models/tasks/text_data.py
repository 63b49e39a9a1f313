"""Text data of a run, checked against its model and sequence length. Torch-free: checked before processes start."""

from __future__ import annotations

from pathlib import Path

from meshwright.data.images import DIGITS, DIGITS_VIDEO
from meshwright.data.text_corpus import Corpus, check_vocab, check_windows, open_corpus
from meshwright.data.text_documents import STDLIB
from meshwright.errors import DataError
from meshwright.models.contract.run_facts import RunFacts

PRESETS = {DIGITS: "dit-digits", DIGITS_VIDEO: "dit-digits-video"}
"""Preset to suggest for each image `data.source`."""


def open_text(f: RunFacts, *, vocab_size: int) -> Corpus:
    """Open the text of a run for a model with a vocabulary of `vocab_size` tokens.

    Raises:
        DataError: the text is missing, empty, too short, not text but images, or has ids outside the vocabulary.
    """
    data = f.data
    if data.source in PRESETS and not Path(data.source).exists():
        raise DataError(
            f"{data.source} is image data, but this model trains on text",
            where=f"data.source, {data.source}",
            rule="a text model takes text files or token files",
            fix=f"the preset {PRESETS[data.source]}, or data.source={STDLIB}",
        )
    corpus = open_corpus(data.source, tokenizer=data.tokenizer, token_dtype=data.token_dtype, cache_dir=data.cache_dir)
    check_windows(corpus, f.seq_len, multiple_of=f.axes.tp if f.sequence_parallel else 1)
    check_vocab(corpus, vocab_size)
    return corpus
