"""A mixture of corpora, and what it has in common with a single one: sources and order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.data.mixtures.entries import ONE
from meshwright.data.mixtures.mixture_order import MixtureOrder
from meshwright.data.sampler import SampleOrder, WindowOrder
from meshwright.data.text_corpus import Corpus
from meshwright.data.token_windows import num_windows

_FORMAT = 1
"""Increment when the same corpora, weights and seed would give other samples."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Corpora that a run reads in proportion to weights.

    Args:
        sources: the corpora; with `data.validation_source`, all have its validation split.
        shares: weight of each in units of 1/ONE, which add up to ONE.
        description: lines for people, with sizes, weights and epochs.
    """

    sources: tuple[Corpus, ...]
    shares: tuple[int, ...]
    description: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the fingerprints of the corpora, and their shares."""
        identity = [_FORMAT, [(corpus.fingerprint, share) for corpus, share in self._with_shares()]]
        return hashlib.sha256(json.dumps(identity).encode("ascii")).hexdigest()

    @property
    def validation_bytes_per_token(self) -> float | None:
        """Average bytes of text per token of the validation samples; None if that of a source is unknown."""
        total = 0.0
        for corpus, share in self._with_shares():
            if corpus.validation_bytes_per_token is None:
                return None
            total += corpus.validation_bytes_per_token * share / ONE
        return total

    @property
    def is_text(self) -> bool:
        """True if the validation split is of the tokenizer."""
        return all(corpus.is_text for corpus in self.sources)

    def _with_shares(self) -> list[tuple[Corpus, int]]:
        return list(zip(self.sources, self.shares, strict=True))


Text = Corpus | Mixture
"""Text of a run: of one source, or of several."""


def corpora(text: Text) -> tuple[Corpus, ...]:
    """Return the corpora of the training split."""
    return text.sources if isinstance(text, Mixture) else (text,)


def validation_shares(text: Text) -> tuple[tuple[Corpus, int], ...]:
    """Return the corpora of the validation split with their shares: one if `data.validation_source` gives it."""
    first = corpora(text)[0]
    if not isinstance(text, Mixture) or first.validation_source is not None:
        return ((first, ONE),)
    return tuple(zip(text.sources, text.shares, strict=True))


def train_sizes(text: Text, seq_len: int) -> tuple[int, ...]:
    """Return the number of training windows of each source: of its stream of tokens, or of packed documents."""
    return tuple(
        num_windows(corpus.train, seq_len) if corpus.packed is None else corpus.packed.train.num_windows
        for corpus in corpora(text)
    )


def train_order(text: Text, sizes: Sequence[int], seed: int) -> SampleOrder:
    """Return the order in which a run reads its text, given the number of training windows of each source."""
    if isinstance(text, Mixture):
        return MixtureOrder(tuple(sizes), text.shares, seed)
    return WindowOrder(sizes[0], seed)
