"""Task and reference of text runs, as families give them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from meshwright.data.mixtures.mixture import Text, corpora
from meshwright.models.contract.family import RunFacts
from meshwright.models.contract.task import Reference, Task
from meshwright.models.tasks.next_token import OwnLoss, TextTask

if TYPE_CHECKING:
    from meshwright.models.tasks.text_reference import LossSum


def text_task(f: RunFacts, text: Text, device: torch.device, loss: OwnLoss | None = None) -> Task:
    """Return the next-token task for a text, packed if the text is."""
    return TextTask(f, text, device, loss)


def text_reference(f: RunFacts, text: Text, loss_sum: LossSum | None = None) -> Reference:
    """Return the reference implementation of the next-token loss for a text, packed if the text is; the loss is
    cross-entropy unless another is given."""
    from meshwright.models.tasks.text_reference import PackedTextReference, TextReference, cross_entropy_sum

    kind = TextReference if corpora(text)[0].packed is None else PackedTextReference
    return kind(f, text, loss_sum or cross_entropy_sum)
