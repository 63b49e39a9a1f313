"""Derive the structure of a transformers model, on the meta device if it can run there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.contract.model_facts import BufferFacts, ParameterFacts, Role, Saved
from meshwright.models.contract.tp_styles import Style
from meshwright.models.hf import private
from meshwright.models.hf.arrange import Sides, arrange, containers, find_sides, remove_aliases, side_modules
from meshwright.models.hf.build_model import build_model, load_config
from meshwright.models.hf.costs import AFTER, BEFORE, count_flops, final_modules, measure_saved, saved_by_kind
from meshwright.models.hf.initial_values import fills_of
from meshwright.models.hf.known_faults import NOT_SPLIT, NOT_TENSOR_PARALLEL
from meshwright.models.hf.packing import why_not_packed
from meshwright.models.hf.probe import NoForward, Probe, probe
from meshwright.models.hf.source import KEY, Source
from meshwright.models.hf.stage import stub_shapes
from meshwright.models.hf.structure import BlockFacts, EndFacts, FillFacts, Structure
from meshwright.models.hf.tp_styles import Unfit, sharded, tp_styles
from meshwright.units import format_count

EXPERTS_ON_META = "batched_mm"
"""Implementation of experts whose shapes depend on no values."""
SAVING_EXPERTS = "grouped_mm"
"""Implementation that, on the meta device too, saves what experts save; the other copies an expert for each token."""
MAX_ON_CPU = 200_000_000
"""Parameters of a model that is probed with values, at most."""
NOTHING_SAVED = Saved()


def derive_structure(source: Source, *, attention: str, seq_len: int, tp: int) -> Structure:
    """Derive the structure of a model, without allocating any of it.

    Raises:
        ConfigError: the model has no layers that can be told apart, or shares parameters between them.
    """
    config = load_config(source)
    if getattr(config, "is_decoder", None) is False:
        raise ConfigError(
            f"{config.model_type} is an encoder: each token sees later ones",
            where=KEY,
            rule="next-token prediction needs a causal model",
            fix=f"{KEY}=qwen3, or is_decoder=true in config.json if the weights are a decoder's",
        )
    model, found = _probed(config, attention)
    sides, stubs = _sides(model, found)
    aliases = _aliases(model, sides)
    remove_aliases(model, aliases)
    sides = Sides(*(tuple(name for name in names if name not in aliases) for names in astuple(sides)))
    arrange(model, found.layers_path, sides.last, sides.every)
    styles, unfit = dict[str, Style](), ""
    found.not_split = found.not_split or NOT_SPLIT.get(config.model_type, "")
    if tp > 1 and config.model_type in NOT_TENSOR_PARALLEL:
        unfit = NOT_TENSOR_PARALLEL[config.model_type]
    elif tp > 1:
        try:
            styles = tp_styles(model, config, tp)
        except Unfit as error:
            unfit = str(error)
    deriver = _Deriver(model, config, found, sides, stubs, styles, seq_len, tp)
    if tp > 1 and aliases:
        unfit = unfit or f"{next(iter(aliases))} is another module's parameter"
    return replace(deriver.structure(), not_tensor_parallel=unfit, aliases=aliases)


def _probed(config: Any, attention: str) -> tuple[nn.Module, Probe]:
    """Build and probe a model on the meta device or, if its forward needs values and it is small, on the CPU."""
    with torch.device("meta"):
        model = build_model(config, attention=attention, experts=EXPERTS_ON_META)
    try:
        return model, probe(model, config)
    except NoForward as error:
        size, reason = sum(parameter.numel() for parameter in model.parameters()), str(error)
    if size <= MAX_ON_CPU:
        model = build_model(config, attention=attention)
        try:
            return model, probe(model, config)
        except NoForward as error:
            reason = str(error)
    raise ConfigError(
        f"the forward of {type(model).__name__} fails: {reason}",
        where=KEY,
        rule="a forward from input_ids alone shows what runs around the layers; it has no values, unless the model has "
        f"at most {format_count(MAX_ON_CPU)} parameters",
        fix=f"{KEY}=qwen3, or a family of your own (model.kind=package.module:Family)",
    )


def _sides(model: nn.Module, found: Probe) -> tuple[Sides, dict[str, tuple[int, ...]]]:
    """Return where parameters are used, and the modules to replace on stages without the first ones. What can't be
    replaced is on every stage."""
    sides, stubs, first = find_sides(model, found), dict[str, tuple[int, ...]](), list[str]()
    for path in side_modules(model, found.layers_path):
        names = [name for name in sides.first if name.startswith(f"{path}.")]
        inside = stub_shapes(model, found.outputs, path) if names else None
        if inside:
            stubs |= inside
            first += names
    first += [name for name in sides.first if name.rpartition(".")[0] in containers(found.layers_path)]
    kept = [name for name in sides.first if name not in first]
    return Sides(tuple(first), (*kept, *sides.every), sides.last), stubs


def _aliases(model: nn.Module, sides: Sides) -> dict[str, str]:
    """Return second names of parameters on the same side of the layers as the first, with the first."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    side_of = {name: side for side, names in zip(Sides.__match_args__, astuple(sides), strict=True) for name in names}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name and name in side_of and side_of[name] == side_of.get(original):
            found[name] = original
    return found


class _Deriver:
    """Turns what was found into facts."""

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        found: Probe,
        sides: Sides,
        stubs: dict[str, tuple[int, ...]],
        styles: dict[str, Style],
        seq_len: int,
        tp: int,
    ) -> None:
        self._model, self._config, self._found, self._sides, self._stubs = model, config, found, sides, stubs
        self._styles = styles
        self._fills = fills_of(model)
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._saved_names = set(model.state_dict())
        layers = model.get_submodule(found.layers_path)
        assert isinstance(layers, nn.ModuleList), "the probe found a list of layers"
        self._layers = list(layers)
        self._tables = [m for _, m in model.named_modules() if isinstance(m, nn.Embedding)]
        self._check_ties()
        self._buffers = {name: _buffer(name, x, name in self._saved_names) for name, x in model.named_buffers()}
        self._flops = count_flops(model, self._layers, seq_len)
        if next(model.parameters()).is_meta:
            private.set_experts(model, SAVING_EXPERTS)
        with sharded(model.to(torch.bfloat16), styles, tp):
            self._saved = measure_saved(model, self._layers, seq_len)
            inside = [path for path in styles if path.startswith(f"{found.layers_path}.")]
            reducing = [path for path in inside if styles[path].reduces_output]
            for path in final_modules(model, self._layers, seq_len, reducing):
                styles[path] = replace(styles[path], kept=False)

    def _check_ties(self) -> None:
        for names in self._names.values():
            inside = [name for name in names if name.startswith(f"{self._found.layers_path}.")]
            if inside and len(names) > 1:
                raise ConfigError(
                    f"{type(self._model).__name__} shares {names[0]} with {names[1]}",
                    where=KEY,
                    rule="each decoder layer has parameters of its own",
                    fix=f"{KEY}=qwen3, or a family of your own (model.kind=package.module:Family)",
                )

    def structure(self) -> Structure:
        """Return the structure."""
        found, path = self._found, self._found.layers_path
        blocks, layers = self._blocks()
        inside = f"{path}."
        outside = [name for name in self._buffers if not name.startswith(inside)]
        stubbed = [n for n in outside if any(n.startswith(f"{stub}.") for stub in self._stubs)]
        owners = {name.rpartition(".")[0] for name in self._sides.last}
        late = [n for n in outside if n not in stubbed and n.rpartition(".")[0] in owners]
        return Structure(
            layers_path=path,
            layers=layers,
            blocks=blocks,
            first=self._end(self._sides.first, stubbed, self._saved[BEFORE], self._flops[BEFORE]),
            every=self._end(self._sides.every, [n for n in outside if n not in {*stubbed, *late}]),
            last=self._end(self._sides.last, late, self._saved[AFTER], self._flops[AFTER]),
            stubs=self._stubs,
            blanks={
                name: tuple(self._model.get_parameter(name).shape)
                for name in self._sides.first
                if name.rpartition(".")[0] in containers(path)
            },
            aliases={},
            fills={name: fill for name, fill in self._fills.items() if not name.startswith(inside)},
            per_token=found.per_token,
            stream=found.stream,
            returns=found.returns,
            vocab_size=found.vocab_size,
            max_len=self._max_len(),
            not_split=found.not_split,
            not_packed=why_not_packed(self._config.model_type),
        )

    def _end(
        self, names: Iterable[str], buffers: Iterable[str], saved: Saved = NOTHING_SAVED, flops: float = 0.0
    ) -> EndFacts:
        wanted = set(names)
        ordered = [name for name, _ in self._model.named_parameters(remove_duplicate=False) if name in wanted]
        parameters = tuple(self._parameter(name) for name in ordered)
        owners = dict.fromkeys(name.rpartition(".")[0] for name in ordered)
        styles = {path: self._styles[path] for path in owners if path in self._styles}
        return EndFacts(parameters, tuple(self._buffers[name] for name in buffers), saved, flops, styles)

    def _parameter(self, name: str) -> ParameterFacts:
        parameter = self._model.get_parameter(name)
        first = self._names[id(parameter)][0]
        owner = self._model.get_submodule(name.rpartition(".")[0])
        shape = tuple(parameter.shape)
        role = Role.VECTOR if parameter.dim() < 2 else Role.MATRIX
        if isinstance(owner, nn.Embedding):
            role = Role.EMBEDDING
        elif shape[0] == self._found.vocab_size and name in self._sides.last and len(shape) == 2:
            role = Role.HEAD
        tied_to = None if first == name else first
        return ParameterFacts(name, shape, role, tied_to=tied_to, frozen=first in self._found.unused)

    def _blocks(self) -> tuple[tuple[BlockFacts, ...], tuple[str, ...]]:
        """Return the kinds of layers, and the name of each layer's kind."""
        signatures: dict[Any, BlockFacts] = {}
        kinds: list[BlockFacts] = []
        layers: list[str] = []
        by_kind: dict[str, list[int]] = {}
        for index in range(len(self._layers)):
            facts = self._block(index)
            pairs = tuple(facts.fills.items()), tuple(facts.styles.items())
            key = (facts.parameters, facts.buffers, facts.flops, *pairs)
            if key not in signatures:
                base = type(self._layers[index]).__name__
                name = base if not kinds else f"{base}.{len(kinds) + 1}"
                signatures[key] = replace(facts, name=name)
                kinds.append(signatures[key])
            layers.append(signatures[key].name)
            by_kind.setdefault(signatures[key].name, []).append(index)
        saved = {name: saved_by_kind(self._saved, indices) for name, indices in by_kind.items()}
        return tuple(replace(kind, saved=saved[kind.name]) for kind in kinds), tuple(layers)

    def _block(self, index: int) -> BlockFacts:
        layer, prefix = self._layers[index], f"{self._found.layers_path}.{index}."
        parameters = []
        for name, parameter in layer.named_parameters():
            shape = tuple(parameter.shape)
            role = Role.VECTOR if len(shape) < 2 else Role.MATRIX
            parameters.append(ParameterFacts(name, shape, role, frozen=prefix + name in self._found.unused))
        styles = {
            path.removeprefix(prefix): _inside(style, prefix)
            for path, style in self._styles.items()
            if path.startswith(prefix) or path == prefix.removesuffix(".")
        }
        buffers = [replace(self._buffers[prefix + name], name=name) for name, _ in layer.named_buffers()]
        fills: dict[str, FillFacts] = {
            name.removeprefix(prefix): fill for name, fill in self._fills.items() if name.startswith(prefix)
        }
        flops = self._flops.get(index, 0.0)
        return BlockFacts("", tuple(parameters), tuple(buffers), fills, Saved(), flops, styles)

    def _max_len(self) -> int | None:
        """Return the rows of a table of learned positions, of which a model may add some for padding."""
        positions = getattr(self._config, "max_position_embeddings", None)
        rows = [table.num_embeddings for table in self._tables]
        found = [positions for n in rows if positions is not None and positions <= n <= positions + 8]
        return min(found, default=None)


def _inside(style: Style, prefix: str) -> Style:
    """Return a style with paths inside a layer."""
    if style.read_by is None:
        return style
    return replace(style, read_by=style.read_by.removeprefix(prefix.removesuffix(".")).removeprefix("."))


def _buffer(name: str, tensor: Tensor, saved: bool) -> BufferFacts:
    return BufferFacts(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), saved=saved)
