"""The corpus of a run, checked against its model and sequence length. Torch-free: errors come before processes."""

from __future__ import annotations

from meshwright.config.schema import RunConfig
from meshwright.data.text import Corpus, check_vocab, check_windows, open_corpus


def open_training_corpus(config: RunConfig) -> Corpus:
    """Open the corpus that `config` names.

    Raises:
        DataError: missing, empty, too short, or with ids the model has no embedding for.
    """
    data = config.data
    corpus = open_corpus(data.source, tokenizer=data.tokenizer, token_dtype=data.token_dtype, cache_dir=data.cache_dir)
    check_windows(corpus, config.train.seq_len)
    check_vocab(corpus, config.model.vocab_size)
    return corpus
