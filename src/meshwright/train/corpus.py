"""The corpus of a run, checked against its model and sequence length. Torch-free: errors come before processes."""

from __future__ import annotations

from pathlib import Path

from meshwright.config.schema import DiTConfig, RunConfig
from meshwright.data.documents import STDLIB
from meshwright.data.pictures import DIGITS, DIGITS_VIDEO, Pictures, open_pictures
from meshwright.data.text import Corpus, check_vocab, check_windows, open_corpus
from meshwright.errors import DataError

PRESETS = {DIGITS: "dit-digits", DIGITS_VIDEO: "dit-digits-video"}
"""The preset that trains on pictures, by their `data.source`."""


def open_training_data(config: RunConfig) -> Corpus | Pictures:
    """Open what `config` trains on.

    Raises:
        DataError: missing, empty, too small, or not what the model takes.
    """
    return open_training_pictures(config) if isinstance(config.model, DiTConfig) else open_training_corpus(config)


def open_training_corpus(config: RunConfig) -> Corpus:
    """Open the text that `config` names.

    Raises:
        DataError: missing, empty, too short, or with ids the model has no embedding for.
    """
    assert not isinstance(config.model, DiTConfig), "a dit trains on pictures"
    data = config.data
    if data.source in PRESETS and not Path(data.source).exists():
        raise DataError(
            f"{data.source} are pictures, and a {config.model.kind} trains on text",
            where=f"data.source, {data.source}",
            rule="pictures are for a dit",
            fix=f"the preset {PRESETS[data.source]}, or data.source={STDLIB}",
        )
    corpus = open_corpus(data.source, tokenizer=data.tokenizer, token_dtype=data.token_dtype, cache_dir=data.cache_dir)
    check_windows(corpus, config.train.seq_len, multiple_of=config.mesh.tp if config.mesh.sequence_parallel else 1)
    check_vocab(corpus, config.model.vocab_size)
    return corpus


def open_training_pictures(config: RunConfig) -> Pictures:
    """Open the pictures that `config` names.

    Raises:
        DataError: missing, unreadable, or of more classes than the model knows.
    """
    model = config.model
    assert isinstance(model, DiTConfig), "a language model trains on text"
    pictures = open_pictures(
        config.data.source,
        image_size=model.image_size,
        num_channels=model.num_channels,
        num_frames=model.num_frames,
    )
    if pictures.num_classes > model.num_classes:
        raise DataError(
            f"model.num_classes = {model.num_classes} is too small: the pictures are of {pictures.num_classes} classes",
            where=f"model.num_classes; data.source, {config.data.source}",
            rule="every picture's class is one of the model's",
            fix=f"model.num_classes={pictures.num_classes}",
        )
    return pictures
