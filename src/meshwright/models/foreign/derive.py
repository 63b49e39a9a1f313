"""Derive the structure of a foreign model, on the meta device if it can run there.

The operators that parameters reach in one forward say their roles. A parameter is a matrix if a matrix product
multiplies it, or something made of parameters alone: a cast, a slice, a sum with adapters. Convolutions, decays of
states and tables that are added are vectors, whatever their dims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError, ModelError
from meshwright.models.contract.model_facts import (
    BufferFacts,
    ExpertFacts,
    HeadFacts,
    ParameterFacts,
    Part,
    Role,
    Saved,
)
from meshwright.models.contract.tp_styles import Style
from meshwright.models.foreign import private
from meshwright.models.foreign.experts import expert_facts, load_facts, noted_calls
from meshwright.models.foreign.head import find_head
from meshwright.models.foreign.origin import (
    LAYER_LISTS,
    MAX_ON_CPU,
    AttentionFound,
    ForeignModel,
    NotSharded,
    Probe,
)
from meshwright.models.foreign.probe import (
    AFTER,
    BEFORE,
    TIMES,
    TO_HEAD,
    NoForward,
    probe,
    saved_by_kind,
)
from meshwright.models.foreign.router_loss import watch_routers
from meshwright.models.foreign.stage import (
    Sides,
    arrange,
    containers,
    find_sides,
    make_stage,
    remove_aliases,
    side_modules,
    stub_shapes,
)
from meshwright.models.foreign.structure import BlockFacts, EndFacts, FillFacts, Structure
from meshwright.models.foreign.tp_shapes import first_that_fits, sharded
from meshwright.models.foreign.trace_operators import Traced, trace_model
from meshwright.nn.linear import undeferred_parameters
from meshwright.units import format_count

NOTHING_SAVED, NOT_TRACED = Saved(), Traced()
LENGTH = "train.seq_len"


def derive_structure(origin: ForeignModel, *, seq_len: int, tp: int) -> Structure:
    """Derive the structure of a model without allocating any of it, or raise a ConfigError: it has no layers that can
    be told apart, or shares parameters between them."""
    model, found = _probed(origin)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            what, rule = f"{name} of {type(model).__name__} is a scalar", "a parameter has a dim that can be sharded"
            raise origin.error(what, rule, f"{name} = torch.nn.Parameter(torch.tensor([…])), with one element")
    origin.check_probe(model, found)
    balance = origin.router_loss(model, found.time)
    ids = torch.zeros((2, found.time), dtype=torch.long, device=next(model.parameters()).device)
    head = find_head(model, origin, ids, found.vocab_size)
    sides, stubs, blanks = _sides(model, found)
    with noted_calls(model, origin.stacked_experts(model)) as calls:
        roles = parameter_roles(model, origin, found, last=set(sides.last))
    experts, unsent = expert_facts(model, found.layers_path, calls)
    unsent = unsent or origin.why_not_dispatched(model, found.time)
    aliases = _aliases(model, sides)
    remove_aliases(model, aliases)
    sides = Sides(*(tuple(name for name in names if name not in aliases) for names in astuple(sides)))
    arrange(model, found.layers_path, sides.last, sides.every)
    styles, unfit = dict[str, Style](), ""
    if tp > 1:
        try:
            styles = first_that_fits(model, origin, found, tp)
        except NotSharded as error:
            unfit = str(error)
    with sharded(model, styles, tp):
        attention = origin.attention(model, seq_len)
    frozen = found.unused | found.frozen
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # so that no input of a frozen matrix counts as saved
    if balance is not None:  # what the loss saves is measured, too
        watch_routers(model, balance)
    deriver = _Deriver(model, origin, found, sides, stubs, blanks, styles, roles, {} if unsent else experts, head,
                       attention, seq_len, tp)  # fmt: skip
    apart = [name for name, target in aliases.items() if not name.startswith(f"{target.rpartition('.')[0]}.")]
    if tp > 1 and apart:
        unfit = unfit or f"{apart[0]} is the parameter of another module, which doesn't contain it"
    undeferred = next(iter(undeferred_parameters(model)), "")
    structure = replace(deriver.structure(), not_tensor_parallel=unfit, aliases=aliases, undeferred=undeferred)
    structure = replace(structure, not_expert_parallel=unsent, router_loss=balance)
    if len(structure.layers) == 1 or structure.not_split or not (origin.tries_stages or structure.carried):
        return structure
    return replace(structure, not_split=_why_not_staged(structure, origin, ids))


def _why_not_staged(structure: Structure, origin: ForeignModel, ids: Tensor) -> str:
    """Return why a forward of two stages fails, in which layers of the other one return nothing but the stream; an
    empty string if it doesn't."""
    count, out = len(structure.layers), ids
    try:
        for number, layers in enumerate((range(count // 2), range(count // 2, count))):
            with torch.device(ids.device):
                model = make_stage(origin.build(), structure, Part(layers, number, 2), origin)
            with torch.no_grad():
                out = model(out, None, ids)
    except Exception as error:
        return f"the forward of a stage fails: {type(error).__name__}: {str(error)[:150]}"
    return ""


def _probed(origin: ForeignModel) -> tuple[nn.Module, Probe]:
    """Build and probe a model on the meta device or, if its forward needs values and it is small, on the CPU."""
    with torch.device("meta"):
        model = origin.build()
    try:
        return model, probe(model, origin)
    except NoForward as error:
        size, reason = sum(parameter.numel() for parameter in model.parameters()), str(error)
    if size <= MAX_ON_CPU:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # what a forward does may depend on values, and all processes have to find the same
            model = origin.build()
        try:
            return model, probe(model, origin)
        except NoForward as error:
            reason = str(error)
    runs_alone = size > MAX_ON_CPU or any(_takes(origin, model, time) for time in TIMES)
    raise origin.error(
        f"the forward of {type(model).__name__} fails: {reason}",
        "a forward of token ids alone shows what runs around the layers; it has no values, unless the model has at "
        f"most {format_count(MAX_ON_CPU)} parameters",
        origin.fix_forward,
        kind=ConfigError if runs_alone else ModelError,
    )


def _takes(origin: ForeignModel, model: nn.Module, length: int) -> bool:
    """Return whether a model's forward takes samples of a length."""
    with suppress(Exception):
        _call_with_zeros(model, length, origin)
        return True
    return False


def _call_with_zeros(model: nn.Module, length: int, origin: ForeignModel) -> None:
    ids = torch.zeros((1, length), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        origin.call(model, ids)


def _sides(model: nn.Module, found: Probe) -> tuple[Sides, dict[str, tuple[int, ...]], list[str]]:
    """Return where parameters are used, and what stages without the first ones replace: modules, and parameters that
    are read without calling their modules. What can't be replaced is on every stage."""
    sides, stubs, first = find_sides(model, found), dict[str, tuple[int, ...]](), list[str]()
    read = set(containers(found.layers_path))
    for path in side_modules(model, found.layers_path):
        names = [name for name in sides.first if name.startswith(f"{path}.")]
        if not any(inner == path or inner.startswith(f"{path}.") for inner in found.phases):
            read |= {name.rpartition(".")[0] for name in names}
        elif names and (inside := stub_shapes(model, found.outputs, path)):
            stubs |= inside
            first += names
    blanks = [name for name in sides.first if name.rpartition(".")[0] in read]
    first += blanks
    kept = [name for name in sides.first if name not in first]
    return Sides(tuple(first), (*kept, *sides.every), sides.last), stubs, blanks


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
        origin: ForeignModel,
        found: Probe,
        sides: Sides,
        stubs: dict[str, tuple[int, ...]],
        blanks: list[str],
        styles: dict[str, Style],
        roles: dict[str, Role],
        experts: dict[int, ExpertFacts],
        head: HeadFacts,
        attention: AttentionFound,
        seq_len: int,
        tp: int,
    ) -> None:
        self._model, self._origin, self._found, self._sides, self._stubs = model, origin, found, sides, stubs
        self._blanks, self._styles, self._frozen = blanks, styles, found.unused | found.frozen
        self._roles, self._experts, self._fills, self._head = roles, experts, origin.fills(), head
        self._attention, self._tp = attention, tp
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._saved_names = set(model.state_dict())
        layers = model.get_submodule(found.layers_path)
        assert isinstance(layers, LAYER_LISTS), "the probe found a list of layers"
        self._layers = list(layers)
        for names in self._names.values():
            if len(names) > 1 and any(name.startswith(f"{found.layers_path}.") for name in names):
                what = f"{type(model).__name__} shares {names[0]} with {names[1]}"
                raise origin.error(what, "each layer has parameters of its own")
        self._buffers = {name: _buffer(name, x, name in self._saved_names) for name, x in model.named_buffers()}
        self._max_len, self._not_packed = origin.max_len(model), origin.not_packed(model, seq_len, attention)
        fitting = (n for n in origin.limits() if n < seq_len and not origin.not_packed(model, n, attention))
        self._packed_len = next(fitting, None) if self._not_packed else None
        self._measure(seq_len, tp)

    def _measure(self, seq_len: int, tp: int) -> None:
        """Measure what the model computes, and what a rank of tp saves, for samples of `seq_len` tokens."""
        model, origin = self._model, self._origin
        try:
            _call_with_zeros(model, seq_len, origin)
        except Exception as error:
            shorter = (seq_len >> shift for shift in range(1, seq_len.bit_length()))
            raise ConfigError(
                f"the forward of {type(self._model).__name__} fails for {seq_len} tokens: {str(error)[:150]}",
                where=LENGTH,
                rule="samples have train.seq_len tokens, which the model takes",
                fix=f"{LENGTH}={next((n for n in shorter if _takes(origin, model, n)), self._found.time)}",
            ) from error
        origin.prepare_saving(model)
        try:
            self._trace(seq_len, tp, torch.bfloat16)
        except Exception:  # tensors of a fixed dtype, which a run casts where they enter a layer
            self._trace(seq_len, tp, torch.float32)

    def _trace(self, seq_len: int, tp: int, dtype: torch.dtype) -> None:
        styles, stream, head = self._styles, self._found.stream, self._head.path
        run = partial(trace_model, self._model.to(dtype), self._layers, seq_len, self._origin, stream, head)
        whole = on_rank = run()
        if styles:
            inside = [path for path in styles if path.startswith(f"{self._found.layers_path}.")]
            with sharded(self._model, styles, tp):
                on_rank = run([path for path in inside if styles[path].reduces_output])
        self._saved, found, size = on_rank.saved, on_rank.places, tp if styles else 1
        self._traced = {place: one.sharded(found.get(place, one), size) for place, one in whole.places.items()}
        for path in on_rank.final:
            styles[path] = replace(styles[path], kept=False)

    def structure(self) -> Structure:
        found, path = self._found, self._found.layers_path
        blocks, layers = self._blocks()
        ids = torch.zeros((2, found.time), dtype=torch.long, device=next(self._model.parameters()).device)
        inside, saved = f"{path}.", self._saved[TO_HEAD] + self._saved[AFTER]
        outside = [name for name in self._buffers if not name.startswith(inside)]
        stubbed = [n for n in outside if any(n.startswith(f"{stub}.") for stub in self._stubs)]
        owners = {name.rpartition(".")[0] for name in self._sides.last}
        late = [n for n in outside if n not in stubbed and n.rpartition(".")[0] in owners]
        before, on_every = self._traced.get(BEFORE, NOT_TRACED).split(set(self._sides.every))
        return Structure(
            layers_path=path,
            layers=layers,
            blocks=blocks,
            first=self._end(self._sides.first, stubbed, self._saved[BEFORE], before),
            every=self._end(self._sides.every, [n for n in outside if n not in {*stubbed, *late}], traced=on_every),
            last=self._end(self._sides.last, late, saved, self._traced.get(AFTER, NOT_TRACED)),
            stubs=self._stubs,
            blanks={name: tuple(self._model.get_parameter(name).shape) for name in self._blanks},
            aliases={},
            fills={name: fill for name, fill in self._fills.items() if not name.startswith(inside)},
            per_token=found.per_token,
            stream=found.stream,
            batch_dims=found.batch_dims,
            between_layers=found.between_layers,
            returns=found.returns,
            vocab_size=found.vocab_size,
            max_len=self._max_len,
            head=replace(self._head, saved=self._saved[AFTER]),
            not_split=found.not_split,
            not_packed=self._not_packed,
            packed_len=self._packed_len,
            not_ours=self._attention.not_ours,
            not_context=self._attention.not_context,
            first_position=self._attention.first_position,
            mixers=self._attention.mixers,
            set_aside=self._origin.set_aside(self._model, ids),
            carried=found.carried,
        )

    def _end(
        self, names: Iterable[str], buffers: Iterable[str], saved: Saved = NOTHING_SAVED, traced: Traced = NOT_TRACED
    ) -> EndFacts:
        wanted = set(names)
        ordered = [name for name, _ in self._model.named_parameters(remove_duplicate=False) if name in wanted]
        parameters = tuple(self._parameter(name) for name in ordered)
        owners = dict.fromkeys(name.rpartition(".")[0] for name in ordered)
        styles = {path: self._styles[path] for path in owners if path in self._styles}
        own = {self._names[id(self._model.get_parameter(name))][0]: name for name in ordered}
        traced = traced.renamed(lambda name: own.get(name, name))
        return EndFacts(
            parameters, tuple(self._buffers[one] for one in buffers), saved, traced.flops, traced.operators, styles
        )

    def _parameter(self, name: str) -> ParameterFacts:
        parameter = self._model.get_parameter(name)
        first = self._names[id(parameter)][0]
        tied_to, shape = None if first == name else first, tuple(parameter.shape)
        return ParameterFacts(name, shape, self._roles[name], tied_to=tied_to, frozen=first in self._frozen)

    def _blocks(self) -> tuple[tuple[BlockFacts, ...], tuple[str, ...]]:
        """Return the kinds of layers, and the name of each layer's kind."""
        signatures: dict[Any, BlockFacts] = {}
        kinds: list[BlockFacts] = []
        layers: list[str] = []
        by_kind: dict[str, list[int]] = {}
        for index in range(len(self._layers)):
            facts = self._block(index)
            pairs = tuple(facts.fills.items()), tuple(facts.styles.items())
            key = (facts.parameters, facts.buffers, facts.flops, facts.attention, facts.experts, *pairs)
            if key not in signatures:
                base = type(self._layers[index]).__name__
                name = base if not kinds else f"{base}.{len(kinds) + 1}"
                signatures[key] = replace(facts, name=name)
                kinds.append(signatures[key])
            layers.append(signatures[key].name)
            by_kind.setdefault(signatures[key].name, []).append(index)
        saved = {name: saved_by_kind(self._saved, indices) for name, indices in by_kind.items()}
        # The first layer makes what all share, and may have an input without a gradient.
        traced = {name: self._traced_in(indices[-1]) for name, indices in by_kind.items()}
        found = (
            replace(
                one, saved=saved[one.name], operators=traced[one.name].operators, compiled=traced[one.name].compiled
            )
            for one in kinds
        )
        return tuple(found), tuple(layers)

    def _traced_in(self, index: int) -> Traced:
        prefix = f"{self._found.layers_path}.{index}."
        return self._traced.get(index, NOT_TRACED).renamed(lambda name: name.removeprefix(prefix))

    def _block(self, index: int) -> BlockFacts:
        layer, prefix = self._layers[index], f"{self._found.layers_path}.{index}."
        parameters = [self._parameter(prefix + name) for name, _ in layer.named_parameters()]
        parameters = [replace(one, name=one.name.removeprefix(prefix)) for one in parameters]
        styles = {
            path.removeprefix(prefix.removesuffix(".")).removeprefix("."): _inside(style, prefix)
            for path, style in self._styles.items()
            if path.startswith(prefix) or path == prefix.removesuffix(".")
        }
        buffers = [replace(self._buffers[prefix + name], name=name) for name, _ in layer.named_buffers()]
        fills: dict[str, FillFacts] = {
            name.removeprefix(prefix): fill for name, fill in self._fills.items() if name.startswith(prefix)
        }
        flops, attention = self._traced_in(index).flops, self._attention.layers.get(index)
        if attention is not None:  # a plan divides heads by tp, whether or not the styles do
            heads = {name: getattr(attention, name) * self._tp for name in ("num_heads", "num_kv_heads")}
            attention = replace(attention, **heads)
        if (experts := self._experts.get(index)) is not None:
            buffers.append(load := load_facts(experts))
            fills[load.name] = FillFacts("constant", 0.0)
        return BlockFacts("", tuple(parameters), tuple(buffers), fills, Saved(), flops, styles=styles,
                          attention=attention, experts=experts)  # fmt: skip


def _inside(style: Style, prefix: str) -> Style:
    if style.read_by is None:
        return style
    return replace(style, read_by=style.read_by.removeprefix(prefix.removesuffix(".")).removeprefix("."))


def _buffer(name: str, tensor: Tensor, saved: bool) -> BufferFacts:
    return BufferFacts(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), saved=saved)


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_grouped_mm", "mkldnn_rnn_layer")
SELECTIONS = ("index", "index_select")
"""Operators that take rows at places which may be any tensor."""


def parameter_roles(model: nn.Module, origin: ForeignModel, found: Probe, *, last: set[str]) -> dict[str, Role]:
    """Return the roles of a model's parameters by all their names; those in `last` are used after the layers."""
    ids = torch.zeros((2, found.time), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad(), _Uses(model, found.vocab_size) as seen:
        origin.call(model, ids)
    roles = dict[str, Role]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses, shape = seen.uses[private.storage_id(parameter)], parameter.shape
        is_table = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        is_head = len(shape) == 2 and shape[0] == found.vocab_size and name in last
        if len(shape) < 2 or (uses == {Role.VECTOR} and not is_table):
            roles[name] = Role.VECTOR
        elif is_table or is_head or Role.EMBEDDING in uses:
            roles[name] = Role.HEAD if is_head and not is_table else Role.EMBEDDING
        else:  # what this forward didn't use, such as an expert without tokens, is as its shape says
            roles[name] = Role.EXPERTS if len(shape) == 3 and Role.MATRIX not in uses else Role.MATRIX
    return roles


class _Uses(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records the roles in which operators use parameters, by the id of their storage."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[int, set[Role]] = defaultdict(set)
        self._vocab_size = vocab_size
        self._parameters = {private.storage_id(parameter): parameter for parameter in model.parameters()}
        self._made_of = {number: {number} for number in self._parameters}
        """Parameters that a tensor is made of, if it is made of nothing else."""
        self._kept: list[Any] = []
        """Such tensors: the storage of one that is freed could be that of an activation."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out, operator = func(*args, **(kwargs or {})), str(func).split(".")[1]
        tensors = [x for x in private.leaves((args, kwargs)) if isinstance(x, Tensor)]
        made_of = [self._made_of.get(private.storage_id(tensor), set()) for tensor in tensors]
        for tensor, numbers in zip(tensors, made_of, strict=True):
            for number in numbers:
                self.uses[number].add(self._use(operator, tensor, self._parameters[number]))
        if operator in SELECTIONS and tensors[0].dim() > 2:
            made_of = made_of[:1]  # experts of tokens
        if made_of and all(made_of) and operator != "embedding":
            for made in private.leaves(out):
                self._kept.append(made)
                self._made_of.setdefault(private.storage_id(made), set().union(*made_of))
        return out

    def _use(self, operator: str, tensor: Tensor, parameter: Tensor) -> Role:
        is_table = parameter.dim() == 2 and parameter.shape[0] == self._vocab_size
        if operator == "embedding" or (operator in SELECTIONS and is_table):
            return Role.EMBEDDING
        sides = sorted(tensor.shape[-2:])
        # A row per head is multiplied as a batch of matrices with one column.
        if operator not in PRODUCTS or len(sides) < 2 or sides[0] == 1 < min(parameter.shape):
            return Role.VECTOR
        is_stack = parameter.dim() == 3 and sides == sorted(parameter.shape[-2:])
        return Role.EXPERTS if is_stack else Role.MATRIX
