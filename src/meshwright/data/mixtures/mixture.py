"""Text of a run: one corpus, or a mixture of several. What both have in common, their order and how they run out, and
how a mixture is described in a run's first lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.data.mixtures.entries import ONE
from meshwright.data.sampler import SampleOrder, WindowOrder
from meshwright.data.text_corpus import Corpus
from meshwright.data.windows import num_windows
from meshwright.errors import DataError
from meshwright.units import counted

_FORMAT = 1
"""Increment when the same corpora, weights and seed would give other samples."""
_EXHAUSTED = "data.when_exhausted"


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
        pairs = zip(self.sources, self.shares, strict=True)
        identity = [_FORMAT, [(corpus.fingerprint, share) for corpus, share in pairs]]
        return hashlib.sha256(json.dumps(identity).encode("ascii")).hexdigest()

    @property
    def validation_bytes_per_token(self) -> float | None:
        """Average bytes of text per token of the validation samples; None if that of a source is unknown."""
        total = 0.0
        for corpus, share in zip(self.sources, self.shares, strict=True):
            if corpus.validation_bytes_per_token is None:
                return None
            total += corpus.validation_bytes_per_token * share / ONE
        return total

    @property
    def is_text(self) -> bool:
        """True if the validation split is of the tokenizer."""
        return all(corpus.is_text for corpus in self.sources)


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
    if not isinstance(text, Mixture):
        return WindowOrder(sizes[0], seed)
    from meshwright.data.mixtures.mixture_order import MixtureOrder

    return MixtureOrder(tuple(sizes), text.shares, seed)


def check_exhaustion(text: Text, order: SampleOrder, *, steps: int, global_batch: int) -> None:
    """Check that no sample of a run is of the second epoch of a source.

    Raises:
        DataError: a source runs out; the fix is the number of steps before that.
    """
    enough = order.first_repeat // global_batch
    if steps <= enough:
        return
    at = order.first_repeats().index(order.first_repeat)
    name, size = corpora(text)[at].source, order.parts[at].num_windows
    raise DataError(
        f"{name} runs out in step {enough + 1} of {steps}: it has {size:,} samples of train.seq_len tokens",
        where=f"{_EXHAUSTED}; train.steps",
        rule="with data.when_exhausted = end, no sample is read twice, so the run ends before a source runs out",
        fix=f"train.steps={enough}, or {_EXHAUSTED}=wrap"
        if enough
        else f"{_EXHAUSTED}=wrap, or a smaller train.global_batch",
    )


def describe(mixture: Mixture, order: SampleOrder, *, num_samples: int) -> str:
    """Return a line for a mixture and one for each source, with its weight, size and epochs in a run."""
    lines = [f"mixture of {counted(len(mixture.sources), 'source')}"]
    for corpus, share, part, number in zip(
        mixture.sources, mixture.shares, order.parts, order.num_read(num_samples), strict=True
    ):
        title, *more = corpus.description.split("\n")
        lines.append(f"  {share / ONE:6.2%}  {title}; {_epochs(number / part.num_windows)} in this run")
        lines += [f"          {line.strip()}" for line in more]
    return "\n".join(lines)


def _epochs(number: float) -> str:
    if number < 0.001:
        return "under 0.001 epochs"
    digits = f"{number:.2g}" if number < 10 else f"{number:,.0f}"
    return f"{digits} epoch{'' if digits == '1' else 's'}"


def with_validation(train: Corpus, validation: Corpus) -> Corpus:
    """Return a corpus that is trained on with all of one source (`Use.TRAIN`), and validated with all of another
    (`Use.VALIDATION`)."""
    assert not len(train.validation) and not len(validation.train), "each is used whole"
    identity = f"validated with another source {train.fingerprint} {validation.fingerprint}"
    return replace(
        train,
        validation=validation.validation,
        validation_documents=validation.validation_documents,
        vocab_size=max(train.vocab_size, validation.vocab_size),
        validation_bytes_per_token=validation.validation_bytes_per_token,
        fingerprint=hashlib.sha256(identity.encode("ascii")).hexdigest(),
        validation_source=validation.source,
        is_text=validation.is_text,
        validation_mask=validation.validation_mask,
    )
