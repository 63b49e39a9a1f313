"""A module of one's own as a foreign model: how it is built, called and sharded.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
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
)
from meshwright.models.foreign.origin import Origin, restarting_positions, with_own_linear
from meshwright.models.foreign.packing import why_not_packed
from meshwright.models.foreign.recorded_fills import build_recorded
from meshwright.models.foreign.structure import FillFacts
from meshwright.models.foreign.tp_shapes import feed_forwards, owners
from meshwright.models.module.config import ModuleConfig
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.settings.import_object import import_object

BUILDER = "model.builder"
RULE = "model.builder is package.module:name of a function or class that returns a torch.nn.Module"
POSITIONS = "position_ids"
STYLES = {
    "column": COLUMN,
    "row": ROW,
    "gathered_column": GATHERED_COLUMN,
    "split_row": SPLIT_ROW,
    "vocabulary": VOCABULARY,
    "head": HEAD,
    "experts": Style(StyleKind.EXPERTS),
    "replicated": REPLICATED,
}
"""Tensor-parallel styles by the names that `model.styles` has for them."""


@dataclass(frozen=True)
class OwnModule(Origin):
    """A module that a builder returns.

    Attributes:
        section: the `model` section.
    """

    section: ModuleConfig
    key = BUILDER
    fix = "a module with such layers"

    def build(self) -> nn.Module:
        """Build the module on the current device."""
        name, arguments = self.section.builder, dict(self.section.arguments)
        builder = import_object(name, key=BUILDER, rule=RULE, format_setting=lambda found: f"{BUILDER}={found}")
        try:
            model = builder(**arguments)
        except Exception as error:
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            what = f"{name}({given}) fails: {type(error).__name__}: {error}"
            raise ConfigError(what, where=BUILDER, rule=RULE, fix="model.arguments that the builder takes") from error
        if not isinstance(model, nn.Module):
            what = f"{name} returns a {type(model).__name__}"
            raise ConfigError(what, where=BUILDER, rule=RULE, fix="return the module")
        return with_own_linear(model)

    def call(self, model: Callable[..., Any], ids: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Return the logits of token ids; a module that takes `position_ids` gets those of packed documents."""
        out = model(ids, **restarting_positions(layout, ids.device))
        if isinstance(out, tuple | list):
            out = out[0]
        logits: Tensor = getattr(out, "logits", out)
        return logits

    def layers_path(self, model: nn.Module) -> str:
        """Return the path of the list of layers."""
        path = self.section.layer_list
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        if path and path not in lists:
            raise ConfigError(
                f"{type(model).__name__} has no list of modules {path}",
                where="model.layer_list",
                rule="model.layer_list is the path of a torch.nn.ModuleList in the module",
                fix=f"model.layer_list={lists[0]}" if lists else "a torch.nn.ModuleList of layers",
            )
        return path or self.largest_list(model, None)

    def fills(self) -> dict[str, FillFacts]:
        """Return the initial values that the constructor gives."""
        return build_recorded(self.build)[1]

    def styles(self, model: nn.Module, width: int) -> Iterator[dict[str, Style]]:
        """Yield the styles of `model.styles`, or those of feed-forward layers that shapes show."""
        modules = owners(model)
        found = dict.fromkeys(modules, REPLICATED)
        for glob, name in self.section.styles:
            matching = [path for path in modules if fnmatchcase(path, glob)]
            if name not in STYLES or not matching:
                raise _no_style(glob, name, list(modules))
            found |= dict.fromkeys(matching, STYLES[name])
        if self.section.styles:
            yield found
        else:
            yield from feed_forwards(model, width)

    def not_packed(self, model: nn.Module) -> str:
        """Return why packed documents see each other in this module."""
        if POSITIONS not in inspect.signature(type(model).forward).parameters:
            return f"the forward of {type(model).__name__} takes no {POSITIONS}, which tell documents apart"
        return why_not_packed(self)


def _no_style(glob: str, name: Any, paths: list[str]) -> ConfigError:
    key = f"model.styles.{glob}"
    if name not in STYLES:
        rule = f"a style is one of {', '.join(STYLES)}"
        return ConfigError(f"{key} = {name!r} is no style", where=key, rule=rule, fix=f"{key}=column")
    return ConfigError(
        f"{key}: no module with parameters has such a path",
        where=key,
        rule="a glob of model.styles matches paths of modules; * matches any part, dots included",
        fix=f"a glob of one of {', '.join(paths[:8])}{' …' if len(paths) > 8 else ''}",
    )


def computed_values(origin: OwnModule, names: frozenset[str], seed: int) -> dict[str, Tensor]:
    """Return initial values as the module's constructor gives them, built whole on the CPU.

    Args:
        origin: the module.
        names: names of parameters and buffers.
        seed: seed of random ones.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.device("cpu"):
            model = origin.build()
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: found[name].detach() for name in names}
