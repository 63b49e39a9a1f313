"""Task and reference of text runs: on windows of a stream, or on packed documents."""

from __future__ import annotations

import torch

from meshwright.data.mixtures.mixture import Text, corpora
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.task import Reference, Task
from meshwright.models.tasks.next_token import OwnLoss, TextTask
from meshwright.models.tasks.next_token_reference import LossSum, TextReference, cross_entropy_sum
from meshwright.models.tasks.packed_next_token import PackedTextTask
from meshwright.models.tasks.packed_reference import PackedTextReference


def text_task(f: RunFacts, text: Text, device: torch.device, loss: OwnLoss | None = None) -> Task:
    """Return the next-token task for a text, packed if the text is."""
    return (PackedTextTask if _is_packed(text) else TextTask)(f, text, device, loss)


def text_reference(f: RunFacts, text: Text, loss_sum: LossSum = cross_entropy_sum) -> Reference:
    """Return the reference implementation of the next-token loss for a text, packed if the text is."""
    return (PackedTextReference if _is_packed(text) else TextReference)(f, text, loss_sum)


def _is_packed(text: Text) -> bool:
    return corpora(text)[0].packed is not None
