"""Uses of a source of text: split for training and validation, or whole for one of them. Torch-free."""

from __future__ import annotations

from enum import Enum


class Use(Enum):
    """Use of the documents of a source."""

    SPLIT = "a tenth held out"
    TRAIN = "all for training"
    VALIDATION = "all for validation"
