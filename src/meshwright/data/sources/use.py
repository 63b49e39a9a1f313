"""How a source of text is used: split for training and validation, or whole for one of them. Torch-free."""

from __future__ import annotations

from enum import Enum


class Use(Enum):
    """How the documents of a source are used."""

    SPLIT = "a tenth held out"
    TRAIN = "all for training"
    VALIDATION = "all for validation"
