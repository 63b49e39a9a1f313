"""Translate transformers' plan of tensor parallelism to our styles.

Transformers' own implementation isn't used: it all-reduces the accumulated gradient of replicated norms in every
backward, which is wrong with more than one micro-batch. Its plan is: which matrices are sharded, and how.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from meshwright.models.contract.tp_styles import (
    COLUMN,
    GATHERED_COLUMN,
    HEAD,
    REPLICATED,
    ROW,
    SPLIT_ROW,
    VOCABULARY,
    Style,
    StyleKind,
    local,
)
from meshwright.models.foreign.tp_shapes import owners
from meshwright.models.hf.known_faults import WITHOUT_SENTINEL

LINEAR: Mapping[str, Style] = {
    "colwise": COLUMN,
    "colwise_gather_output": GATHERED_COLUMN,
    "colwise_rep": GATHERED_COLUMN,
    "rowwise": ROW,
    "rowwise_split_input": SPLIT_ROW,
    "rowwise_rep": SPLIT_ROW,
}
"""Styles of linear layers."""
ROWS = "embedding_rowwise"
EXPERTS = "moe_tp_experts"
EXPERT_INPUTS = 3
"""Inputs of experts: tokens, the indices of each token's experts, and their weights."""
LATENT_KEYS = "mla_kv_a_proj"


def tp_styles(model: nn.Module, plan: Mapping[str, str], config: Any) -> dict[str, Style]:
    """Return the style of each module with parameters, by its path in the model.

    Args:
        model: model on the meta device.
        plan: transformers' styles by glob of module or parameter names.
        config: its configuration.
    """
    return {path: _style(path, module, plan, config) for path, module in owners(model).items()}


def _style(path: str, module: nn.Module, plan: Mapping[str, str], config: Any) -> Style:
    name = next((style for glob, style in plan.items() if fnmatchcase(path, glob)), None)
    if name == EXPERTS:
        return _experts(path, module, config)
    if name == LATENT_KEYS:
        return Style(StyleKind.REPLICATED, partial_tail=config.qk_rope_head_dim)
    if name == ROWS and isinstance(module, nn.Embedding) and not list(module.children()):
        return VOCABULARY
    if name is not None and name in LINEAR and isinstance(module, nn.Linear):
        is_outside = not any(part.isdigit() for part in path.split("."))  # layers are numbered
        is_head = is_outside and module.out_features == getattr(config, "vocab_size", None)
        return HEAD if is_head and LINEAR[name] is GATHERED_COLUMN else LINEAR[name]
    own = {
        leaf: style
        for leaf, _ in module.named_parameters(recurse=False)
        for glob, style in plan.items()
        if fnmatchcase(f"{path}.{leaf}", glob)
    }
    is_whole = len(own) == sum(1 for _ in module.parameters(recurse=False))
    if is_whole and all(style == "colwise" for style in own.values()):
        return local(**dict.fromkeys(own, 0))
    return REPLICATED  # styles that are not ours, too: what then meets shards is found by shapes


def _experts(path: str, module: nn.Module, config: Any) -> Style:
    """Return the style of experts: sharded by expert, or replicated where a rank couldn't run its own alone."""
    count = getattr(module, "num_experts", None)
    shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
    has_own = any(True for child in module.children() for _ in child.parameters())
    takes_indices = len(inspect.signature(module.forward).parameters) >= EXPERT_INPUTS
    is_stacked = count is not None and all(shape[0] == count for shape in shapes)
    if has_own or not takes_indices or not is_stacked or config.model_type in WITHOUT_SENTINEL:
        return REPLICATED
    return Style(StyleKind.EXPERTS, top_k=int(getattr(config, "num_experts_per_tok", 0) or 1))
