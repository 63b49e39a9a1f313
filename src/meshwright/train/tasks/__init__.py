"""The kinds of training there are, by the kind of model."""

from __future__ import annotations

import torch

from meshwright.config.schema import RunConfig
from meshwright.data.pictures import Pictures
from meshwright.data.text import Corpus
from meshwright.train.tasks.base import Task
from meshwright.train.tasks.pictures import PictureTask
from meshwright.train.tasks.text import TextTask


def build_task(config: RunConfig, corpus: Corpus | Pictures, device: torch.device) -> Task:
    """What `config` trains on `corpus`, on this rank."""
    if isinstance(corpus, Pictures):
        return PictureTask(config, corpus, device)
    return TextTask(config, corpus, device)
