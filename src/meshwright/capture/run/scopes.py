"""Find the modules that a scope captures, in any model: models contain no graph code.

A scope is a name of this file, a glob over the names of modules in a block, or `region:NAME` for what a model's own
code marks with `graph_region`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from meshwright.config.section_rules import REGION
from meshwright.nn.experts.layer import MixtureOfExperts
from meshwright.nn.experts.router import Router
from meshwright.nn.transformer_block import Attention

FEED_FORWARD_NAMES = ("ffn", "mlp", "feed_forward")

Matches = Callable[[str, nn.Module], bool]
SCOPES: Mapping[str, Matches] = {
    "layer": lambda name, module: name == "",
    "attention": lambda name, module: isinstance(module, Attention),
    "mlp": lambda name, module: name in FEED_FORWARD_NAMES,
    "moe_router": lambda name, module: isinstance(module, Router),
    "moe": lambda name, module: isinstance(module, MixtureOfExperts),
}
"""Which modules of a block a scope captures, by their names in the block."""

_entered = threading.local()


@contextmanager
def graph_region(name: str) -> Iterator[None]:
    """Mark the modules that are called in the context, for the scope `region:NAME`.

    Only the outermost calls count: a module that is called within another one belongs to that one's graph. Outside of
    the observed step this does nothing.
    """
    before = getattr(_entered, "names", ())
    _entered.names = (*before, name)
    try:
        yield
    finally:
        _entered.names = before


def current_regions() -> tuple[str, ...]:
    """Return the names of the regions that this thread is in, outermost first."""
    names: tuple[str, ...] = getattr(_entered, "names", ())
    return names


@contextmanager
def finding_regions(module: nn.Module, scopes: tuple[str, ...]) -> Iterator[dict[str, nn.Module]]:
    """Yield a dict that gets the modules called in regions of the given scopes within the context, by name."""
    wanted = {scope.removeprefix(REGION) for scope in scopes if scope.startswith(REGION)}
    found: dict[str, nn.Module] = {}
    depth = 0

    def before(name: str) -> Callable[..., None]:
        def hook(called: nn.Module, *_: Any) -> None:
            nonlocal depth
            if not depth and wanted & set(current_regions()):
                found[name] = called
            depth += bool(wanted & set(current_regions()))

        return hook

    def after(*_: Any) -> None:
        nonlocal depth
        depth -= bool(wanted & set(current_regions()))

    handles = []
    for name, one in module.named_modules():
        handles += [one.register_forward_pre_hook(before(name)), one.register_forward_hook(after, always_call=True)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def select(block: nn.Module, scopes: tuple[str, ...]) -> dict[str, tuple[nn.Module, str]]:
    """Return the modules of a block that scopes capture, with their scope, by name; outermost ones only."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in block.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer in found)
        scope = next((scope for scope in scopes if _matches(scope, name, module)), None)
        if not inside and scope is not None:
            found[name] = module, scope
    return found


def _matches(scope: str, name: str, module: nn.Module) -> bool:
    if scope in SCOPES:
        return SCOPES[scope](name, module)
    return not scope.startswith(REGION) and fnmatchcase(name, scope)
