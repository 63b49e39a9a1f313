"""Validate a corpus with text of another source, `data.validation_source`, in place of a held-out part. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from meshwright.data.text_corpus import Corpus


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
