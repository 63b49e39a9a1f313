"""Translate transformers' plan of tensor parallelism to our styles, and check it on the meta device.

Transformers' own implementation isn't used: it all-reduces the accumulated gradient of replicated norms in every
backward, which is wrong with more than one micro-batch. Its plan is: which matrices are sharded, and how. What is
replicated but meets shards follows from shapes: in a forward with sharded matrices, on the meta device, a module whose
input has another shape than before works on shards, so its gradients are partial. A plan that doesn't fit fails there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.models.contract.tp_styles import (
    COLUMN,
    DIVIDED,
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
from meshwright.models.hf import private
from meshwright.models.hf.probe import TIME

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
LATENT_KEYS = "mla_kv_a_proj"
LOCAL_PARAMETERS = "local_params"


class Unfit(Exception):
    """A plan of tensor parallelism that doesn't fit the model, and why."""


def tp_styles(model: nn.Module, config: Any, tp: int) -> dict[str, Style]:
    """Return the style of each module with parameters, by its path in the model.

    Args:
        model: model on the meta device; its parameters are sharded for a forward, and restored.
        config: its configuration.
        tp: size of tp.

    Raises:
        Unfit: transformers has no plan, or one that doesn't fit.
    """
    plan = private.tensor_parallel_plan(model)
    owners = {p: m for p, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
    if plan:
        styles = {path: _style(path, module, plan, config) for path, module in owners.items()}
    else:
        styles = dict.fromkeys(owners, REPLICATED) | dict(_feed_forwards(model, config.hidden_size))
    _match_ties(model, styles)
    if all(style in (REPLICATED, DIVIDED) for style in styles.values()):
        source = "transformers' tensor-parallel plan for" if plan else "there is no tensor-parallel plan, and"
        raise Unfit(f"{source} {type(model).__name__} shards nothing")
    before = _shapes(model, styles)
    with sharded(model, styles, tp):
        after = _shapes(model, styles)
    for path, style in styles.items():
        if path not in before and style.kind is not StyleKind.REPLICATED:
            raise Unfit(f"{path} is sharded in transformers' plan, but its parameters are read without calling it")
        if style.kind is StyleKind.REPLICATED and after.get(path) != before.get(path):
            styles[path] = DIVIDED
        elif style == REPLICATED and path not in before and path:
            styles[path] = replace(style, read_by=path.rpartition(".")[0])
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
            raise Unfit(f"{path} has sharded and replicated parameters")
        return local(**dict.fromkeys(own, 0))
    if name in (None, LOCAL_PARAMETERS, *REPLICAS) and not own:
        return REPLICATED
    raise Unfit(f"{path} ({type(module).__name__}) has transformers' style {name or own}, which is not supported")


def _feed_forwards(model: nn.Module, width: int) -> Iterator[tuple[str, Style]]:
    """Yield styles of feed-forward layers, for a model without a plan: a module with one matrix to the stream's width
    from another width, and others to that width. Their shapes say so; the rest stays replicated."""
    for path, parent in model.named_modules():
        children = {n: sizes for n, child in parent.named_children() if (sizes := _sizes(child))}
        downs = [name for name, (taken, given) in children.items() if given == width and taken != width]
        if len(downs) != 1:
            continue
        inner = children[downs[0]][0]
        ups = [name for name, sizes in children.items() if sizes == (width, inner)]
        for name in (*ups, *downs) if ups else ():
            child = getattr(parent, name)
            is_up = name != downs[0]
            yield f"{path}.{name}", _feed_forward_style(child, width, is_up=is_up)


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return the widths of a linear layer's input and output, or None for another module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, private.transposed_linear()):
        taken, given = module.weight.shape
        return taken, given
    return None


def _feed_forward_style(child: nn.Module, width: int, *, is_up: bool) -> Style:
    if isinstance(child, nn.Linear):
        return COLUMN if is_up else ROW
    if is_up:  # transposed matrices, of GPT-2's time
        return Style(StyleKind.LOCAL, dims=(("bias", 0), ("weight", 1)), summed_input=width)
    return Style(StyleKind.LOCAL, dims=(("weight", 0),), reduced_output=width)


def _experts(path: str, module: nn.Module, config: Any) -> Style:
    count = getattr(module, "num_experts", None)
    shapes = {leaf: tuple(p.shape) for leaf, p in module.named_parameters(recurse=False)}
    if any(True for child in module.children() for _ in child.parameters()):
        raise Unfit(f"{path} ({type(module).__name__}) has experts in modules of their own")
    if count is None or any(shape[0] != count for shape in shapes.values()):
        raise Unfit(f"{path} ({type(module).__name__}) has parameters that are not stacked by expert")
    return Style(StyleKind.EXPERTS, top_k=int(getattr(config, "num_experts_per_tok", 0) or 1))


def _match_ties(model: nn.Module, styles: dict[str, Style]) -> None:
    """Make tied parameters lie alike: a head that shares a sharded table is sharded, too, and else neither is."""
    names: dict[int, list[str]] = {}
    for path in styles:
        for parameter in model.get_submodule(path).parameters(recurse=False):
            names.setdefault(id(parameter), []).append(path)
    for paths in names.values():
        if len(paths) < 2:
            continue
        kinds = {styles[path].kind for path in paths}
        if kinds != {StyleKind.VOCABULARY, StyleKind.HEAD}:
            styles.update(dict.fromkeys(paths, REPLICATED))


@contextmanager
def sharded(model: nn.Module, styles: Mapping[str, Style], tp: int) -> Iterator[None]:
    """Let the model on the meta device have the parameters of one tp rank."""
    original: list[tuple[nn.Module, str, nn.Parameter]] = []
    counts: list[tuple[nn.Module, int]] = []
    handles: list[Any] = []
    for path, style in styles.items():
        module = model.get_submodule(path)
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            dim = _dim(style, leaf, parameter)
            if dim is None:
                continue
            if parameter.shape[dim] % tp and style.kind is not StyleKind.HEAD:
                raise Unfit(f"{path}.{leaf}: {parameter.shape[dim]} along dim {dim} is not divisible by {tp}")
            shape = [-(-n // tp) if d == dim else n for d, n in enumerate(parameter.shape)]
            original.append((module, leaf, parameter))
            setattr(module, leaf, nn.Parameter(parameter.new_zeros(shape)))
        if style.kind is StyleKind.EXPERTS:
            count = cast("int", module.num_experts)
            counts.append((module, count))
            module.num_experts = count // tp  # type: ignore[assignment]
        handles += _gathering(module, style, tp)
    try:
        yield
    finally:
        for module, leaf, parameter in original:
            setattr(module, leaf, parameter)
        for module, count in counts:
            module.num_experts = count  # type: ignore[assignment]
        for handle in handles:
            handle.remove()


def _dim(style: Style, leaf: str, parameter: Tensor) -> int | None:
    if style.kind in (StyleKind.COLUMN, StyleKind.HEAD, StyleKind.EXPERTS):
        return 0
    if style.kind is StyleKind.ROW:
        return 1 if parameter.dim() == 2 else None
    if style.kind is StyleKind.LOCAL:
        return dict(style.dims).get(leaf)
    return None


def _gathering(module: nn.Module, style: Style, tp: int) -> Iterator[Any]:
    """Imitate the gathering of outputs and splitting of inputs, and experts for a rank's share of tokens, by shape."""
    if style.gathered and style.kind is StyleKind.COLUMN:
        yield module.register_forward_hook(lambda module, inputs, out: torch.cat([out] * tp, -1))
    elif style.gathered:
        yield module.register_forward_pre_hook(lambda module, inputs: (inputs[0].chunk(tp, -1)[0], *inputs[1:]))
    elif style.kind is StyleKind.EXPERTS:
        yield from _sharing(module, tp)


def _sharing(module: nn.Module, tp: int) -> Iterator[Any]:
    """Imitate experts for a rank's share of the tokens, which add their rows to the output, and save them for it."""
    whole = [0]

    def share(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        whole[0] = len(inputs[0])
        return tuple(x[: -(-len(x) // tp)] for x in inputs)

    def add(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        chosen = inputs[1]
        rows = out.repeat(chosen.shape[-1], *[1] * (out.dim() - 1))
        return out.new_zeros((whole[0], *out.shape[1:])).index_add(0, chosen.flatten()[: len(rows)], rows)

    yield module.register_forward_pre_hook(share)
    yield module.register_forward_hook(add)


def _shapes(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of the tensors that each module takes in a forward.

    Raises:
        Unfit: the forward fails.
    """
    found: dict[str, tuple[Any, ...]] = {}

    def record(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            found[path] = tuple(tuple(x.shape) for x in tensors)

        return hook

    handles = [model.get_submodule(path).register_forward_pre_hook(record(path), with_kwargs=True) for path in styles]
    try:
        with private.on_meta(), torch.no_grad():
            ids = torch.zeros((2, TIME), dtype=torch.long, device=next(model.parameters()).device)
            model(input_ids=ids, use_cache=False)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:150]}"
        raise Unfit(f"a forward with shards of the matrices fails: {why}") from error
    finally:
        for handle in handles:
            handle.remove()
    return found
