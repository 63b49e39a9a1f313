"""A run's sources in its first lines, with their weights, sizes and epochs; which of them may run out, and which text
validates (`data.validation_source`)."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from meshwright.data.mixtures.entries import ONE
from meshwright.data.mixtures.mixture import Mixture, Text, corpora
from meshwright.data.mixtures.mixture_order import MixtureOrder
from meshwright.data.sampler import SampleOrder
from meshwright.data.text_corpus import Corpus
from meshwright.errors import DataError
from meshwright.units import counted


def describe(mixture: Mixture, order: SampleOrder, *, num_samples: int) -> str:
    """Return a line for a mixture and one for each source.

    Args:
        mixture: the mixture.
        order: order of its samples.
        num_samples: samples of the run.
    """
    assert isinstance(order, MixtureOrder), "a mixture has an order of its own"
    lines = [f"mixture of {counted(len(mixture.sources), 'source')}"]
    for corpus, share, size, number in zip(
        mixture.sources, mixture.shares, order.sizes, order.num_read(num_samples), strict=True
    ):
        title, *more = corpus.description.split("\n")
        lines.append(f"  {share / ONE:6.2%}  {title}; {_epochs(number / size)} in this run")
        lines += [f"          {line.strip()}" for line in more]
    return "\n".join(lines)


def _epochs(number: float) -> str:
    if number < 0.001:
        return "under 0.001 epochs"
    digits = f"{number:.2g}" if number < 10 else f"{number:,.0f}"
    return f"{digits} epoch{'' if digits == '1' else 's'}"


KEY = "data.when_exhausted"


def check_exhaustion(text: Text, order: SampleOrder, *, steps: int, global_batch: int) -> None:
    """Check that no sample of a run is of the second epoch of a source.

    Args:
        text: text of the run.
        order: order of its samples.
        steps: steps of the run.
        global_batch: samples per step.

    Raises:
        DataError: a source runs out; the fix is the number of steps before that.
    """
    enough = order.first_repeat // global_batch
    if steps <= enough:
        return
    repeats = order.first_repeats() if isinstance(order, MixtureOrder) else (order.first_repeat,)
    at = repeats.index(order.first_repeat)
    name, size = corpora(text)[at].source, order.parts[at].num_windows
    raise DataError(
        f"{name} runs out in step {enough + 1} of {steps}: it has {size:,} samples of train.seq_len tokens",
        where=f"{KEY}; train.steps",
        rule="with data.when_exhausted = end, no sample is read twice, so the run ends before a source runs out",
        fix=f"train.steps={enough}, or {KEY}=wrap" if enough else f"{KEY}=wrap, or a smaller train.global_batch",
    )


def with_validation(train: Corpus, validation: Corpus) -> Corpus:
    """Return a corpus that is trained on with all of one source, and validated with all of another.

    Args:
        train: corpus of the use `Use.TRAIN`.
        validation: corpus of the use `Use.VALIDATION`.
    """
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
