"""Names of torch that only some files may use: collectives, and private names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.house.source import Module, Tree

COLLECTIVE_ROOMS = ("comm", "testing")
"""The rooms that move bytes between ranks."""

COLLECTIVE = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|broadcast|all_to_all|gather|scatter|send|recv|isend|irecv)(_\w+)?"
    r"|reduce|barrier|monitored_barrier|batch_isend_irecv|P2POp"
)

PRIVATE_WORDS = "Private PyTorch names"
"""What the docstring of a room's one adapter to private names says."""

PRIVATE_ATTRIBUTES = ("_local_tensor", "_get_fsdp_state", "_fsdp_param_group", "_typed_storage")
"""Private attributes of torch's objects, which no import gives away."""


def collective_breaches(tree: Tree) -> list[str]:
    """Collectives of `torch.distributed` used outside the rooms for it."""
    breaches = []
    for module in tree.package:
        if module.room in COLLECTIVE_ROOMS:
            continue
        for line, name in _torch_names(module):
            if name.startswith("torch.distributed.") and COLLECTIVE.fullmatch(name.rpartition(".")[2]):
                breaches.append(f"{module.path}:{line} uses {name}; only {', '.join(COLLECTIVE_ROOMS)} may")
    return breaches


def private_breaches(tree: Tree) -> list[str]:
    """Private names of torch outside an adapter, and second adapters of a room."""
    breaches = []
    adapters: dict[str, list[str]] = defaultdict(list)
    for module in tree.package:
        if PRIVATE_WORDS in module.docstring:
            adapters[module.room].append(module.path)
            continue
        uses = [(line, name) for line, name in _torch_names(module) if _is_private(name)]
        uses += [
            (node.lineno, f".{node.attr}")
            for node in module.nodes
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES
        ]
        breaches += [
            f"{module.path}:{line} uses {name}, but its docstring has no section {PRIVATE_WORDS!r}"
            for line, name in uses
        ]
    for room, paths in adapters.items():
        if len(paths) > 1:
            breaches.append(f"{room} has {len(paths)} adapters to private names: {', '.join(paths)}")
    return breaches


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _torch_names(module: Module) -> Iterator[tuple[int, str]]:
    """Full dotted names of torch in imports and in expressions, each with its line."""
    for one in module.imports:
        if _of_torch(one.target):
            yield one.line, one.target
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            name = module.full_name(node)
            if name is not None and _of_torch(name):
                yield node.lineno, name


def _of_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"
