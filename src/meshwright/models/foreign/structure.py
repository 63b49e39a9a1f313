"""Structure of a foreign model, for the plan and the stages, as a value. Doesn't import torch.

`derive` finds it on the meta device; a cache keeps it, one JSON file per model, layout of tp and versions, so that a
plan needs neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from meshwright.data.cache_file import atomic_write, preferred_directory, writable_directory
from meshwright.models.contract.building_blocks import DIVIDED, FULL, cross_entropy
from meshwright.models.contract.family import RunFacts
from meshwright.models.contract.model_facts import (
    AttentionFacts,
    AuxiliaryLoss,
    BufferFacts,
    EdgeFacts,
    ExpertFacts,
    HeadFacts,
    KindFacts,
    ModelFacts,
    ParameterFacts,
    Saved,
)
from meshwright.models.contract.operators import Operator
from meshwright.models.contract.tp_styles import Style, StyleKind


@dataclass(frozen=True)
class FillFacts:
    """Initial values of a parameter or buffer."""

    how: Literal["normal", "uniform", "constant", "computed"]
    value: float = 0.0
    """Standard deviation, largest absolute value, or the constant."""


@dataclass(frozen=True)
class BlockFacts:
    """A kind of decoder layers that are alike in everything."""

    name: str
    parameters: tuple[ParameterFacts, ...]
    buffers: tuple[BufferFacts, ...]
    fills: dict[str, FillFacts]
    """Initial values by name inside the layer, without adapters."""
    saved: Saved
    flops: float
    """Forward floating-point operations per token."""
    operators: tuple[Operator, ...] = ()
    """Empty if a backward can't run without values."""
    compiled: Saved | None = None
    """What a compiled layer saves; None if that is unknown."""
    styles: dict[str, Style] = field(default_factory=dict)
    attention: AttentionFacts | None = None
    """None if it is unknown."""
    experts: ExpertFacts | None = None
    """Experts that ep can shard."""


@dataclass(frozen=True)
class EndFacts:
    """Parameters and buffers outside the layers, with their names in the model."""

    parameters: tuple[ParameterFacts, ...] = ()
    buffers: tuple[BufferFacts, ...] = ()
    saved: Saved = Saved()
    flops: float = 0.0
    operators: tuple[Operator, ...] = ()
    styles: dict[str, Style] = field(default_factory=dict)


@dataclass(frozen=True)
class Carried:
    """A tensor that a layer takes from earlier ones besides the stream."""

    path: tuple[int | str, ...]
    """Position or name of the argument that it is in, and where it is inside that."""
    per_token: tuple[int, ...]
    """Shape per token."""
    batch_dims: tuple[int, int]
    """Dims that are samples and tokens."""


@dataclass(frozen=True)
class RouterLoss:
    """A balance loss of all routers together, a mean over samples."""

    weight: float
    routers: tuple[tuple[str, int], ...]
    """Paths of the routers, with the index of their logits in what they return."""
    num_experts: int
    top_k: int

    def width(self, f: RunFacts) -> int:
        """Return the features per token of a rank that take the counts and probabilities of a sample's experts, in two
        numbers each where a number has two bytes."""
        numbers = 2 * self.num_experts * (2 if f.precision in ("bfloat16", "float16") else 1)
        return -(-numbers * f.axes.cp // f.seq_len)


@dataclass(frozen=True)
class Structure:
    """A foreign model, split into its decoder layers and what is around them."""

    layers_path: str
    """Path of the list of decoder layers."""
    layers: tuple[str, ...]
    """Name of the kind of each layer."""
    blocks: tuple[BlockFacts, ...]
    first: EndFacts
    """Parts that only the first stage has."""
    every: EndFacts
    """Parts that every stage has: buffers of rotary embeddings, and parameters that layers of several stages use."""
    last: EndFacts
    """Parts that only the last stage has."""
    stubs: dict[str, tuple[int, ...]]
    """Modules that return zeros on other stages than the first, with the shapes of their outputs (see `probe`)."""
    blanks: dict[str, tuple[int, ...]]
    """Parameters that are read without calling their modules and are zeros on other stages than the first, with their
    shapes."""
    fills: dict[str, FillFacts]
    """Initial values of all that is outside the layers."""
    aliases: dict[str, str]
    """Second names of parameters that are used together with the first: a module reads the other's."""
    per_token: tuple[int, ...]
    """Shape of the stream between layers per token."""
    stream: int | str
    """Position or name of the stream among a layer's arguments."""
    batch_dims: tuple[int, int]
    """Dims of the stream that are samples and tokens."""
    between_layers: bool
    """Whether something is computed between a layer and the next."""
    returns: tuple[str, int]
    """Form of a layer's output: `tensor`, `tuple` or `list`, and its length."""
    vocab_size: int
    max_len: int | None
    """Rows of a table of learned positions; None without one."""
    not_split: str = ""
    """Reason why the layers can't be split over pipeline stages; empty if they can."""
    not_tensor_parallel: str = ""
    """Reason why matrices can't be sharded over tp; empty if they can."""
    not_expert_parallel: str = ""
    """Reason why experts can't be sharded over ep; empty if they can."""
    not_packed: str = ""
    """Reason why packed documents would see each other; empty if they don't."""
    packed_len: int | None = None
    """A shorter sample in which they don't."""
    not_ours: str = ""
    """Reason why our attention can't take the place of the model's; empty if it can."""
    not_context: str = ""
    """Reason why samples can't be sharded by tokens; empty if they can."""
    first_position: int = 0
    """Position of a sample's first token."""
    mixers: tuple[tuple[str, str], ...] = ()
    """Path in a layer and class of modules that run document by document with our attention."""
    set_aside: tuple[str, ...] = ()
    """What of the model takes no part in training, a line each."""
    head: HeadFacts = HeadFacts()
    undeferred: str = ""
    """A matrix whose gradient can't be deferred: of neither a linear layer nor an embedding; empty without one."""
    router_loss: RouterLoss | None = None
    """Loss of the routers that the model's own forward adds."""
    carried: tuple[tuple[Carried, ...], ...] = ()
    """Tensors that each layer takes besides the stream and, last, those of the last layer's arguments that the parts
    after the layers take; empty if there are none."""

    def carried_elements(self, *, allow_empty: bool) -> int:
        """Return the most elements per token that pass between stages besides the stream; only a last stage without
        layers, which has to be allowed, takes what is after them."""
        cuts = self.carried if allow_empty else self.carried[:-1]
        return max((sum(prod(one.per_token) for one in passing) for passing in cuts), default=0)


def describe(structure: Structure, f: RunFacts, identity: Mapping[str, Any], *, ours: bool = False) -> ModelFacts:
    """Describe a model, whose attention is ours or its own."""
    blocks = tuple(_kind(block, structure, ours=ours) for block in structure.blocks)
    flops = {block.name: block.flops for block in structure.blocks}
    carried, routers = structure.carried_elements(allow_empty=f.allow_empty_stages), structure.router_loss
    carried += 0 if routers is None else routers.width(f)
    first, every, last = (_end(name, getattr(structure, name)) for name in ("first", "every", "last"))
    shards_logits = any(style.kind is StyleKind.HEAD for style in structure.last.styles.values())
    loss = cross_entropy(structure.vocab_size, DIVIDED if shards_logits else FULL)
    auxiliary = () if routers is None else (AuxiliaryLoss("balance", routers.weight, num_counts=routers.num_experts),)
    last = replace(last, operators=(*last.operators, loss) if last.operators else (), auxiliary=auxiliary)
    has_every = structure.every.parameters or structure.every.buffers
    return ModelFacts(
        kinds=blocks,
        layers=structure.layers,
        edge=EdgeFacts("stream", (f.seq_len, *structure.per_token), carried=carried),
        tokens=f.seq_len,
        identity=identity,
        first=(first,),
        every=(every,) if has_every else (),
        last=(replace(last, output=float(structure.vocab_size), head=structure.head, output_divided=shards_logits),),
        keeps_documents_apart=not structure.not_packed,
        undeferred=structure.undeferred,
        not_expert_parallel=structure.not_expert_parallel,
        # The backward costs twice the forward.
        flops_per_token=3.0 * (sum(flops[name] for name in structure.layers) + structure.last.flops),
    )


def _kind(block: BlockFacts, structure: Structure, *, ours: bool) -> KindFacts:
    path = f"{structure.layers_path}.{{layer}}"
    return KindFacts(
        block.name, path, block.parameters, block.buffers, saved=block.saved, compiled=block.compiled,
        flops=block.flops, operators=block.operators, attention=block.attention if ours else None,
        experts=block.experts,
    )  # fmt: skip


def _end(name: str, end: EndFacts) -> KindFacts:
    return KindFacts(name, "", end.parameters, end.buffers, saved=end.saved, flops=end.flops, operators=end.operators)


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


FORMAT = 36
"""Increased when the derivation changes, so that earlier files are derived again."""
_ADAPTER = TypeAdapter(Structure)


def cached_structure(key: Mapping[str, Any], derive: Callable[[], Structure], *, cache_dir: str | None) -> Structure:
    """Return the structure kept under a key, JSON values that determine it; derive and keep it if there is none.

    Raises:
        DataError: the file can't be written.
    """
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **key}, sort_keys=True).encode()).hexdigest()
    name, preferred = f"model-{digest[:32]}.json", preferred_directory(cache_dir)
    if preferred is not None and (found := _read(preferred / name)) is not None:
        return found
    directory = writable_directory(preferred)
    if directory != preferred and (found := _read(directory / name)) is not None:
        return found
    found = derive()
    with atomic_write(directory / name) as file:
        file.write(_ADAPTER.dump_json(found))
    return found


def _read(path: Path) -> Structure | None:
    """Return the structure in a file, or None if there is none or it is damaged."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
