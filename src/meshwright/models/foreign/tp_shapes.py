"""Tensor-parallel styles of a foreign model: what follows from shapes on the meta device.

What is replicated but meets shards has gradients that are partial: in a forward with sharded matrices, on the meta
device, a module whose input has another shape than before works on shards. Styles that don't fit fail there.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.models.contract.tp_styles import COLUMN, DIVIDED, REPLICATED, ROW, Style, StyleKind
from meshwright.models.foreign.origin import ForeignModel, NotSharded, Probe


def owners(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with parameters of their own, by path."""
    return {path: m for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}


def first_that_fits(model: nn.Module, origin: ForeignModel, found: Probe, tp: int) -> dict[str, Style]:
    """Return the first of a model's styles that fits it, completed (see `complete_styles`), or raise NotSharded with
    what the first one lacks."""
    failed = None
    for styles in origin.styles(model, found.per_token[-1]):
        try:
            return complete_styles(model, styles, tp, origin, found.time)
        except NotSharded as error:
            failed = failed or error
    assert failed is not None, "there are styles to try"
    raise failed


def complete_styles(
    model: nn.Module, styles: Mapping[str, Style], tp: int, origin: ForeignModel, time: int
) -> dict[str, Style]:
    """Return styles in which tied parameters lie alike, and replicated modules that meet shards are marked.

    The model's parameters are sharded on the meta device for a forward of `time` tokens, and restored.

    Raises:
        NotSharded: nothing is sharded, or the model fails with these shards.
    """
    styles = dict(styles)
    _match_ties(model, styles)
    if all(style in (REPLICATED, DIVIDED) for style in styles.values()):
        raise NotSharded(f"no matrix of {type(model).__name__} is sharded")
    before = _shapes(model, styles, origin, time)
    with sharded(model, styles, tp):
        after = _shapes(model, styles, origin, time)
        if _writes_to_outputs(model, styles, origin, time):
            linear = (StyleKind.COLUMN, StyleKind.ROW)
            styles = {path: replace(style, cloned=style.kind in linear) for path, style in styles.items()}
    for path, style in styles.items():
        if path not in before and style.kind is not StyleKind.REPLICATED:
            raise NotSharded(
                f"{path} is sharded, but a forward reads its parameters without calling it, or doesn't need it"
            )
        if style.kind is StyleKind.REPLICATED and after.get(path) != before.get(path):
            styles[path] = DIVIDED
        elif style == REPLICATED and path not in before and path:
            styles[path] = replace(style, read_by=path.rpartition(".")[0])
    return styles


def feed_forwards(
    model: nn.Module, width: int, transposed: type[nn.Module] | None = None
) -> Iterator[dict[str, Style]]:
    """Yield styles of a model of which feed-forward layers are sharded, for one without a plan.

    Such a layer is a matrix to the stream's width from another width, and others to that width from the stream's, in
    the smallest module that has both: their shapes say so. Where that takes other matrices for one, only those count
    that are in one module, side by side. The weight [d, e] of `transposed` linear layers is transposed.
    """
    replicated = dict.fromkeys(owners(model), REPLICATED)
    for side_by_side in (False, True):
        yield replicated | dict(_feed_forwards(model, width, transposed, side_by_side=side_by_side))


def _feed_forwards(
    model: nn.Module, width: int, transposed: type[nn.Module] | None, *, side_by_side: bool
) -> Iterator[tuple[str, Style]]:
    left = {path: sizes for path, module in model.named_modules() if (sizes := _sizes(module, transposed))}
    parents = sorted((path for path, _ in model.named_modules()), key=lambda path: -path.count(".") - bool(path))
    for parent in parents:
        prefix = f"{parent}." if parent else ""
        inside = {path: sizes for path, sizes in left.items() if path.startswith(prefix) and path != parent}
        if side_by_side:
            inside = {path: sizes for path, sizes in inside.items() if "." not in path.removeprefix(prefix)}
        downs = [path for path, (taken, given) in inside.items() if given == width and taken != width]
        if len(downs) != 1:
            continue
        ups = [path for path, sizes in inside.items() if sizes == (width, inside[downs[0]][0])]
        for path in (*ups, *downs) if ups else ():
            del left[path]
            yield path, _feed_forward_style(model.get_submodule(path), width, is_up=path != downs[0])


def _sizes(module: nn.Module, transposed: type[nn.Module] | None) -> tuple[int, int] | None:
    """Return the widths of a linear layer's input and output, or None for another module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if transposed is not None and isinstance(module, transposed):
        taken, given = cast("Tensor", module.weight).shape
        return taken, given
    return None


def _feed_forward_style(child: nn.Module, width: int, *, is_up: bool) -> Style:
    if isinstance(child, nn.Linear):
        return COLUMN if is_up else ROW
    if is_up:  # transposed matrices, of GPT-2's time
        return Style(StyleKind.LOCAL, dims=(("bias", 0), ("weight", 1)), summed_input=width)
    return Style(StyleKind.LOCAL, dims=(("weight", 0),), reduced_output=width)


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
    try:
        for path, style in styles.items():
            module = model.get_submodule(path)
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                dim = _dim(style, leaf, parameter)
                if dim is None:
                    continue
                if parameter.shape[dim] % tp and style.kind is not StyleKind.HEAD:
                    raise NotSharded(f"{path}.{leaf}: {parameter.shape[dim]} along dim {dim} is not divisible by {tp}")
                shape = [-(-n // tp) if d == dim else n for d, n in enumerate(parameter.shape)]
                original.append((module, leaf, parameter))
                setattr(module, leaf, nn.Parameter(parameter.new_zeros(shape), requires_grad=parameter.requires_grad))
            if style.kind is StyleKind.EXPERTS:
                count = cast("int", module.num_experts)
                counts.append((module, count))
                module.num_experts = count // tp  # type: ignore[assignment]
            handles += _gathering(module, style, tp)
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


class _View(torch.autograd.Function):
    """View of a tensor, as a DTensor's local tensor is: autograd forbids to write to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _writes_to_outputs(model: nn.Module, styles: Mapping[str, Style], origin: ForeignModel, time: int) -> bool:
    """Return whether the model writes to outputs of sharded linear layers in place."""

    def view(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Any:
        return _View.apply(out)  # type: ignore[no-untyped-call]

    linear = [path for path, style in styles.items() if style.kind in (StyleKind.COLUMN, StyleKind.ROW)]
    handles = [model.get_submodule(path).register_forward_hook(view) for path in linear]
    try:
        origin.call(model, torch.zeros((2, time), dtype=torch.long, device=next(model.parameters()).device))
    except RuntimeError as error:
        return "is a view and is being modified inplace" in str(error)
    finally:
        for handle in handles:
            handle.remove()
    return False


def _shapes(
    model: nn.Module, styles: Mapping[str, Style], origin: ForeignModel, time: int
) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of the tensors that each module takes in a forward, or raise NotSharded if that fails."""
    found: dict[str, tuple[Any, ...]] = {}

    def record(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            found[path] = tuple(tuple(x.shape) for x in tensors)

        return hook

    handles = [model.get_submodule(path).register_forward_pre_hook(record(path), with_kwargs=True) for path in styles]
    try:
        with torch.no_grad():
            ids = torch.zeros((2, time), dtype=torch.long, device=next(model.parameters()).device)
            origin.call(model, ids)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:150]}"
        raise NotSharded(f"a forward with shards of the matrices fails{_line_of(error)}: {why}") from error
    finally:
        for handle in handles:
            handle.remove()
    return found


def _line_of(error: Exception) -> str:
    """Return the last line of the model's own code that an error came through, in words."""
    others = (Path(__file__).parents[2], Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not any(Path(one.filename).is_relative_to(folder) for folder in others)]
    return "".join(f" at {Path(one.filename).name}:{one.lineno} in {one.name}" for one in own[-1:])
