"""Task and reference of text runs: on windows of a stream, or on packed documents."""

from __future__ import annotations

import torch

from meshwright.data.text_corpus import Corpus
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.task import Reference, Task
from meshwright.models.tasks.next_token import TextTask
from meshwright.models.tasks.next_token_reference import TextReference
from meshwright.models.tasks.packed_next_token import PackedTextTask
from meshwright.models.tasks.packed_reference import PackedTextReference


def text_task(f: RunFacts, corpus: Corpus, device: torch.device) -> Task:
    """Return the next-token task for a corpus, packed if the corpus is."""
    return TextTask(f, corpus, device) if corpus.packed is None else PackedTextTask(f, corpus, device)


def text_reference(f: RunFacts, corpus: Corpus) -> Reference:
    """Return the reference implementation of the next-token loss for a corpus, packed if the corpus is."""
    return TextReference(f, corpus) if corpus.packed is None else PackedTextReference(f, corpus)
