"""Layouts of single models that the catalogue has shown not to work, with the reasons. Torch-free."""

from __future__ import annotations

PLAN_UNFIT = (
    "dbrx",  # experts are modules of their own inside a stack of parameters
    "dots3_note_text",  # parameters that it leaves replicated get partial gradients
    "gemma3n_text",  # parameters of sharded modules are read without calling them
)
"""Model types whose plan of tensor parallelism is wrong, or isn't ours: only feed-forward layers are sharded."""
WITHOUT_SENTINEL = ("nemotron_h",)
"""Model types whose experts take no index that stands for other ranks' experts: all ranks run all."""
