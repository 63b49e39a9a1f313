"""Layouts of single models that the catalogue has shown not to work, with the reasons: they are refused. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

NOT_SPLIT: Mapping[str, str] = {
    "big_bird": "BigBird's layers keep a mask of blocks that only its own encoder passes on",
}
"""Model types whose layers can't be split over pp."""
NOT_TENSOR_PARALLEL: Mapping[str, str] = {
    "dbrx": "DBRX's experts are modules of their own inside a stack of parameters",
    "dots3_note_text": "parameters that transformers' plan leaves replicated get partial gradients",
    "gemma3n_text": "Gemma 3n reads parameters of sharded modules without calling them",
}
"""Model types that transformers' plan of tensor parallelism doesn't fit."""
WITHOUT_SENTINEL = ("nemotron_h",)
"""Model types whose experts take no index that stands for other ranks' experts: all ranks run all."""
