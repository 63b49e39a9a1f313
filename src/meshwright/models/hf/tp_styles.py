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
from meshwright.models.foreign.origin import NotSharded
from meshwright.models.foreign.tp_shapes import feed_forwards, owners
from meshwright.models.hf import private
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
REPLICAS = ("replicate", "replicated_with_grad_allreduce")
EXPERTS = "moe_tp_experts"
EXPERT_INPUTS = 3
"""Inputs of experts: tokens, the indices of each token's experts, and their weights."""
LATENT_KEYS = "mla_kv_a_proj"
LOCAL_PARAMETERS = "local_params"


def tp_styles(model: nn.Module, config: Any, width: int) -> dict[str, Style]:
    """Return the style of each module with parameters, by its path in the model.

    Args:
        model: model on the meta device.
        config: its configuration.
        width: features of the stream between layers.

    Raises:
        NotSharded: transformers has a plan that our styles don't express, or none where shapes say nothing.
    """
    plan = private.tensor_parallel_plan(model)
    if plan:
        styles = {path: _style(path, module, plan, config) for path, module in owners(model).items()}
    else:
        found = feed_forwards(model, width, private.transposed_linear())
        styles = dict.fromkeys(owners(model), REPLICATED) | dict(found)
    if all(style == REPLICATED for style in styles.values()):
        source = "transformers' tensor-parallel plan for" if plan else "there is no tensor-parallel plan, and"
        raise NotSharded(f"{source} {type(model).__name__} shards nothing")
    return styles


def _style(path: str, module: nn.Module, plan: Mapping[str, str], config: Any) -> Style:
    name = next((style for glob, style in plan.items() if fnmatchcase(path, glob)), None)
    if name == EXPERTS:
        return _experts(path, module, config)
    if name == LATENT_KEYS:
        return Style(StyleKind.REPLICATED, partial_tail=config.qk_rope_head_dim)
    if name == ROWS and isinstance(module, nn.Embedding):
        return VOCABULARY
    if name is not None and name in LINEAR and isinstance(module, nn.Linear):
        is_head = path.endswith("lm_head") or module.out_features == getattr(config, "vocab_size", None)
        return HEAD if is_head and LINEAR[name] is GATHERED_COLUMN else LINEAR[name]
    own = {
        leaf: style
        for leaf, _ in module.named_parameters(recurse=False)
        for glob, style in plan.items()
        if fnmatchcase(f"{path}.{leaf}", glob)
    }
    if own and all(style == "colwise" for style in own.values()):
        if len(own) < sum(1 for _ in module.parameters(recurse=False)):
            raise NotSharded(f"{path} has sharded and replicated parameters")
        return local(**dict.fromkeys(own, 0))
    if name in (None, LOCAL_PARAMETERS, *REPLICAS) and not own:
        return REPLICATED
    raise NotSharded(f"{path} ({type(module).__name__}) has transformers' style {name or own}, which is not supported")


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
