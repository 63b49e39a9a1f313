"""Describe a foreign model by its structure. Doesn't import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.contract.model_facts import EdgeFacts, KindFacts, ModelFacts, ParameterFacts
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.tp_styles import StyleKind
from meshwright.models.foreign.structure import BlockFacts, EndFacts, FillFacts, Structure


def describe(structure: Structure, f: RunFacts, identity: Mapping[str, Any]) -> ModelFacts:
    """Describe a model of this structure."""
    blocks = tuple(_kind(block, structure) for block in structure.blocks)
    flops = {block.name: block.flops for block in structure.blocks}
    first, every, last = (_end(name, getattr(structure, name)) for name in ("first", "every", "last"))
    has_every = structure.every.parameters or structure.every.buffers
    return ModelFacts(
        kinds=blocks,
        layers=structure.layers,
        edge=EdgeFacts("stream", (f.seq_len, *structure.per_token)),
        tokens=f.seq_len,
        identity=identity,
        first=(first,),
        every=(every,) if has_every else (),
        last=(replace(last, output=float(structure.vocab_size), output_divided=_shards_logits(structure)),),
        keeps_documents_apart=not structure.not_packed,
        undeferred=structure.undeferred,
        # The backward costs twice the forward.
        flops_per_token=3.0 * (sum(flops[name] for name in structure.layers) + structure.last.flops),
    )


def _kind(block: BlockFacts, structure: Structure) -> KindFacts:
    path = f"{structure.layers_path}.{{layer}}"
    return KindFacts(block.name, path, block.parameters, block.buffers, saved=block.saved, flops=block.flops)


def _end(name: str, end: EndFacts) -> KindFacts:
    return KindFacts(name, "", end.parameters, end.buffers, saved=end.saved, flops=end.flops)


def _shards_logits(structure: Structure) -> bool:
    """Return whether logits are sharded over tp."""
    return any(style.kind is StyleKind.HEAD for style in structure.last.styles.values())


def parameter_of(structure: Structure, name: str) -> ParameterFacts:
    """Return a layer's parameter by its name in the model."""
    layer, _, inside = name.removeprefix(f"{structure.layers_path}.").partition(".")
    block = next(block for block in structure.blocks if block.name == structure.layers[int(layer)])
    return next(parameter for parameter in block.parameters if parameter.name == inside)


def fill_of(structure: Structure, name: str) -> FillFacts:
    """Return the initial values of a parameter or buffer by its name in the model."""
    prefix = f"{structure.layers_path}."
    if not name.startswith(prefix):
        return structure.fills[name]
    layer, _, inside = name.removeprefix(prefix).partition(".")
    return next(block for block in structure.blocks if block.name == structure.layers[int(layer)]).fills[inside]


@dataclass(frozen=True)
class SavedTensors:
    """Tensors that a model's weights consist of, by name."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of parameters and saved buffers, tied ones by their first name."""
    integers: frozenset[str]
    """Buffers among them that aren't floating-point."""
    ties: Mapping[str, str]
    """Other names of tied parameters, with the first."""


def saved_tensors(structure: Structure) -> SavedTensors:
    """Return the parameters and saved buffers of a model."""
    parts: list[tuple[str, EndFacts | BlockFacts]] = []
    parts += [("", end) for end in (structure.first, structure.every, structure.last)]
    by_name = {block.name: block for block in structure.blocks}
    parts += [(f"{structure.layers_path}.{i}.", by_name[kind]) for i, kind in enumerate(structure.layers)]
    shapes: dict[str, tuple[int, ...]] = {}
    integers: set[str] = set()
    ties = dict(structure.aliases)
    for prefix, part in parts:
        ties |= {prefix + p.name: p.tied_to for p in part.parameters if p.tied_to is not None}
        shapes |= {prefix + p.name: p.shape for p in part.parameters if p.tied_to is None}
        shapes |= {prefix + b.name: b.shape for b in part.buffers if b.saved}
        integers |= {prefix + b.name for b in part.buffers if b.saved and "float" not in b.dtype}
    return SavedTensors(shapes, frozenset(integers), ties)


def computed_names(structure: Structure) -> frozenset[str]:
    """Return the names of the parameters and buffers whose initial values are computed."""
    found = {name for name, fill in structure.fills.items() if fill.how == "computed"}
    by_name = {block.name: block for block in structure.blocks}
    for layer, kind in enumerate(structure.layers):
        inside = (name for name, fill in by_name[kind].fills.items() if fill.how == "computed")
        found |= {f"{structure.layers_path}.{layer}.{name}" for name in inside}
    return frozenset(found)
