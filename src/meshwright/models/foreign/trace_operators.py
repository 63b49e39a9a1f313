"""Operators of a foreign model, from a forward and a backward of two samples on the meta device.

A dispatch mode sees the kernels of both passes: each matrix product becomes an operator, named after its parameter;
attention another; and all else of a layer is kernels bound by memory. Hooks on the stream between layers tell whose
kernels they are, in the backward, too. What autograd saves tells where a recomputed forward ends.

In a compiled block, kernels between two products become one, which reads what others have written and writes what
others read.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.models.contract.operators import Kernels, Operator, OperatorKind, Rerun
from meshwright.models.contract.saved import Saved
from meshwright.models.foreign import private
from meshwright.models.foreign.origin import ForeignModel
from meshwright.models.foreign.probe import AFTER, BEFORE, TO_HEAD, FusedAttention, Place

ACTIVATIONS = "product"
"""Name of a product of two activations."""
OTHERS = "others"
"""Name of a layer's kernels that are bound by memory."""
LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "scatter", "scatter_add"})
"""Operators that read no more of a table than they return."""
TABLE_GRADIENT = "embedding_dense_backward"
"""Operator that writes a whole table, whatever the tokens."""
CONVOLUTION, GRADIENTS = "convolution", ("input_gradient", "second_gradient")
GROUPED = "_grouped_mm"
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", GROUPED, CONVOLUTION, "convolution_backward", "mv", "addmv"})
SAMPLES = 2
"""Samples of the trace: what a single one shares among heads by its strides is copied for several."""
CHOICE = "topk"
"""Operator whose results selective recomputation keeps."""
ATTENTION = "_scaled_dot_product"
"""Beginning of the names of fused attention."""
CAST = {torch.bfloat16, torch.float32}
"""Dtypes of a cast that only a compute dtype of two bytes needs."""
Sizes = dict[int, Saved]
"""Sizes of tensors by storage."""


@dataclass(frozen=True)
class Traced:
    """What is computed at a place."""

    flops: float = 0.0
    """Operations of the forward per token."""
    operators: tuple[Operator, ...] = ()
    """Empty if a backward fails without values."""
    compiled: Saved | None = None
    """What it saves if it is compiled; None if that is unknown."""

    def sharded(self, on_rank: Traced, tp: int) -> Traced:
        """Return the same with what a rank of tp computes; of a weight's product and attention what it is before tp
        shards them, since a plan divides these."""
        pairs = list(zip(self.operators, on_rank.operators, strict=False))
        if len(self.operators) != len(on_rank.operators) or any(a.kind is not b.kind for a, b in pairs):
            return self
        operators = tuple(_before_tp(whole, shard, tp) for whole, shard in pairs)
        return replace(self, operators=operators, compiled=on_rank.compiled)

    def split(self, names: Collection[str]) -> tuple[Traced, Traced]:
        """Return what is computed without these parameters, and their products."""
        apart = tuple(one for one in self.operators if one.name in names)
        flops = sum(one.flops for one in apart)
        others = tuple(one for one in self.operators if one.name not in names)
        return Traced(self.flops - flops, others), Traced(flops, apart)

    def renamed(self, rename: Callable[[str], str]) -> Traced:
        """Return the same with other names of parameters."""
        names = ((one, rename(one.name)) for one in self.operators)
        return replace(self, operators=tuple(replace(one, name=name.removesuffix(".weight")) for one, name in names))


def _before_tp(whole: Operator, shard: Operator, tp: int) -> Operator:
    if whole.kind is OperatorKind.ATTENTION:
        return replace(shard, attention_flops=tp * shard.attention_flops)
    return shard if whole.kind is OperatorKind.MEMORY or whole.name == ACTIVATIONS else whole


@dataclass
class _Kernel:
    """A kernel: a product or attention, with its operator, or one bound by memory."""

    number: int
    name: str
    read: Sizes
    written: Sizes
    operator: Operator | None = None
    size: int = 0
    """Multiplications of a product."""
    is_cast: bool = False
    once: Saved = Saved()

    @property
    def is_product(self) -> bool:
        return self.name in PRODUCTS

    @property
    def is_attention(self) -> bool:
        return self.name.startswith(ATTENTION)

    @property
    def by_memory(self) -> bool:
        return not (self.is_product or self.is_attention)

    @property
    def is_elementwise(self) -> bool:
        read = max(map(_order, self.read.values()), default=0.0)
        return self.by_memory and self.name not in LOOKUPS and min(map(_order, self.written.values())) >= read

    @property
    def moved(self) -> Saved:
        return _total([*self.read.values(), *self.written.values()])


@dataclass
class _Place:
    """Kernels of a layer, or of what is before or after the layers."""

    forward: list[_Kernel] = field(default_factory=list)
    backward: list[_Kernel] = field(default_factory=list)
    num_rerun: int = 0
    """Kernels of the forward that a recomputed one runs again."""


@dataclass(frozen=True)
class TracedModel:
    """What a model computes and saves, per token of a sample."""

    places: Mapping[Place, Traced]
    saved: Mapping[Place, Saved]
    """Elements in bfloat16 are those of the compute dtype; wider ones are computed in float32 whatever that is. A
    tensor that several layers save, such as a mask, is counted once, where it is saved first."""
    final: frozenset[str]
    """Those of the modules asked for after which their layer saves nothing: recomputation ends before the reduction of
    their output."""


def trace_model(
    model: nn.Module, layers: list[nn.Module], seq_len: int, origin: ForeignModel, stream: int | str, head: str,
    modules: Iterable[str] = (),
) -> TracedModel:  # fmt: skip
    """Run a model of bfloat16, or of float32, and return what it computes and saves.

    Args:
        model: the model.
        layers: its decoder layers.
        seq_len: tokens of a sample.
        origin: how the model is called.
        stream: position or name of the stream among a layer's arguments.
        head: path of the output head.
        modules: paths of modules inside layers.
    """
    trace = _Trace(model, SAMPLES * seq_len)
    ids = torch.zeros((SAMPLES, seq_len), dtype=torch.long, device=next(model.parameters()).device)
    handles = [
        layer.register_forward_pre_hook(trace.enter(index, stream), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    handles.append(layers[-1].register_forward_hook(trace.end(len(layers) - 1)))
    handles += [model.get_submodule(path).register_forward_hook(trace.note(path)) for path in modules]
    handles.append(model.get_submodule(head).register_forward_hook(trace.leave_head))
    try:
        with FusedAttention(), trace, saved_tensors_hooks(trace.pack, lambda tensor: tensor):
            logits = origin.call(model, ids)
        trace.is_backward = True
        runs_backward = not logits.requires_grad or trace.run_backward(logits)
        results = [one.grad for one in model.parameters() if one.grad is not None]
        found = trace.operators({private.storage_id(one) for one in (logits, *results)})
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    places = {place: Traced(sum(one.flops for one in operators)) for place, operators in found.items()}
    if runs_backward:
        places = {at: replace(one, operators=found[at], compiled=trace.compiled(at)) for at, one in places.items()}
    return TracedModel(places, trace.saved, frozenset(trace.final))


class _Trace(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records kernels by place."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_backward = False
        self._tokens, self._number = tokens, 0
        self._place: Place = BEFORE
        self._places: defaultdict[Place, _Place] = defaultdict(_Place)
        self._last_read: dict[int, int] = {}
        self._kept: list[Any] = []
        """Storages of results: one that is freed could have the id of another. The results themselves can't be kept:
        autograd copies a gradient that something else holds."""
        self._names = {private.storage_id(p): name for name, p in reversed([*model.named_parameters()])}
        """Names of parameters, and of what is made of them alone, by storage."""
        self.saved, self.final = defaultdict[Place, Saved](Saved), set[str]()
        self._seen = {private.storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._num_saved, self._saved_before = 0, dict[str, int]()
        self._streams = dict[Place, int]()
        """Storage of each layer's input."""
        self._trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def enter(self, index: int, stream: int | str) -> Callable[..., None]:
        """Return a hook for a layer's inputs."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._leave(index)
            x = args[stream] if isinstance(stream, int) else kwargs[stream]
            self._streams[index] = private.storage_id(x)
            self._move_once(x, index - 1 if index else BEFORE)

        return hook

    def end(self, last: int) -> Callable[..., None]:
        """Return a hook for the last layer's output."""

        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self._leave(AFTER)
            self._move_once(out if isinstance(out, Tensor) else out[0], last)

        return hook

    def note(self, path: str) -> Callable[..., None]:
        """Return a hook for the output of a module that may be final."""
        return lambda *_: self._saved_before.update({path: self._num_saved})

    def leave_head(self, *_: Any) -> None:
        """Tell what was saved before the head has ended from what comes after it."""
        self.saved[TO_HEAD] = self.saved.pop(AFTER, Saved())

    def _leave(self, place: Place) -> None:
        self.final |= {path for path, number in self._saved_before.items() if number == self._num_saved}
        self._saved_before.clear()
        self._place = place

    def _move_once(self, x: Tensor, place: Place) -> None:
        """Let kernels of the backward belong to a place from when a tensor's gradient is known."""

        def move(gradient: Tensor) -> None:
            self._place = place

        if x.requires_grad:
            x.register_hook(move)  # type: ignore[no-untyped-call]

    def pack(self, tensor: Tensor) -> Tensor:
        """Note that a recomputed forward runs until here, and what is saved."""
        found = self._places[self._place]
        found.num_rerun = len(found.forward)
        self._num_saved += 1
        if private.storage_id(tensor) not in self._seen:
            self._seen.add(private.storage_id(tensor))
            self._kept.append(tensor.untyped_storage())
            elements = tensor.untyped_storage().nbytes() / tensor.element_size() / self._tokens
            self.saved[self._place] += _as_saved(tensor, elements)
        return tensor

    def run_backward(self, logits: Tensor) -> bool:
        """Run the backward, and return whether that works."""
        gradient = torch.zeros_like(logits)
        with self, suppress(Exception):
            logits.backward(gradient)  # type: ignore[no-untyped-call]
            return True
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and record it if it is a kernel."""
        inputs = [x for x in private.leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        outputs = [x for x in private.leaves(out) if isinstance(x, Tensor)]
        self._kept += [x.untyped_storage() for x in outputs]
        name = private.base_name(func)
        if inputs and name not in LOOKUPS and all(private.storage_id(x) in self._names for x in inputs):
            for made in outputs:
                self._names.setdefault(private.storage_id(made), self._names[private.storage_id(inputs[0])])
        if private.is_kernel(func):
            self._record(name, args, inputs, outputs)
        return out

    def _record(self, name: str, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        read, written = self._sizes(inputs), self._sizes(outputs)
        if name in LOOKUPS:
            table = max(inputs, key=lambda x: x.numel())
            read[private.storage_id(table)] = next(iter(written.values()))
        kernel = _Kernel(self._number, name, read, written)
        self._last_read |= dict.fromkeys(read, self._number)
        self._number += 1
        if name == TABLE_GRADIENT:
            kernel.once, kernel.written = _total(written.values(), self._tokens), {}
        kernel.is_cast = name == "_to_copy" and {one.dtype for one in (*inputs, *outputs)} == CAST
        if kernel.is_product:
            first, second = _operands(name, args)
            kernel.size = first.numel() * (second.shape[-1] if second.dim() > 1 else 1)
        if not self.is_backward and kernel.is_product:
            kernel.operator = self._product(name, args, outputs[0])
        elif not self.is_backward and kernel.is_attention:
            kernel.operator = self._attention(args)
        found = self._places[self._place]
        (found.backward if self.is_backward else found.forward).append(kernel)

    def _sizes(self, tensors: Iterable[Tensor]) -> Sizes:
        """Return the elements per token of tensors; each element of an expanded one counts once."""
        found = Sizes()
        for x in tensors:
            number = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
            size = _as_saved(x, number / self._tokens)
            found[private.storage_id(x)] = max(found.get(private.storage_id(x), size), size, key=_order)
        return found

    def _product(self, name: str, args: tuple[Any, ...], out: Tensor) -> Operator:
        """Return the operator of a product: of rows with a parameter, or of two activations."""
        first, second = _operands(name, args)
        names = [self._names.get(private.storage_id(x)) for x in (first, second)]
        batch = first.shape[0] if first.dim() == 3 and name != GROUPED else 1
        if name == CONVOLUTION:
            columns, inner = second.shape[0], second.numel() // second.shape[0]
            rows = out.numel() // columns
        elif names[0] is not None and names[1] is None:  # a parameter comes first: columns of the second are rows
            (columns, inner), rows = first.shape[-2:], batch * second.shape[-1]
            first, second, names = second, first, names[::-1]
        else:
            rows, inner = batch * first.shape[-2], first.shape[-1]
            columns = second.shape[-1] if second.dim() > 1 else 1
        groups = second.shape[0] if name == GROUPED and second.dim() == 3 else 1
        parameter = names[1]
        # A weight is read once per micro-batch, the second of two activations for each sample.
        each = Kernels(moved=_total(self._sizes([second]).values())) if parameter is None else Kernels()
        return Operator(
            ACTIVATIONS if parameter is None else parameter,
            OperatorKind.PRODUCT if groups == 1 else OperatorKind.GROUPED,
            rows / self._tokens,
            inner,
            columns,
            groups=groups, forward=each, backward=each, fused_forward=each, fused_backward=each,
            input_gradient=first.requires_grad, second_gradient=parameter is None and second.requires_grad,
            wide=not _is_narrow(first),
        )  # fmt: skip

    def _attention(self, args: tuple[Any, ...]) -> Operator:
        """Return the operator of attention, of all pairs of queries and keys unless it is causal by itself."""
        query, key, value = args[:3]
        queries, keys = query.shape[-2], key.shape[-2]
        is_causal = queries == keys and next((one for one in args[3:] if one is True), False)
        pairs = queries * (queries + 1) // 2 if is_causal else queries * keys
        flops = 2 * math.prod(query.shape[:-2]) * pairs * (query.shape[-1] + value.shape[-1])
        return Operator("attention", OperatorKind.ATTENTION, attention_flops=flops / self._tokens)

    def operators(self, results: set[int]) -> dict[Place, tuple[Operator, ...]]:
        """Return the operators of each place, given the storages of logits and gradients of parameters."""
        self._last_read |= dict.fromkeys(results, self._number)
        self._drop_gradients()
        return {place: tuple(self._of_place(found)) for place, found in self._places.items()}

    def compiled(self, place: Place) -> Saved | None:
        """Return what a compiled layer of attention saves, and None for experts, which may stay eager, and others: what
        products and attention of its backward read, and that from which PyTorch's partitioner computes again what else
        is read, chains of elementwise kernels."""
        found, saved, seen = self._places[place], Sizes(), set[int]()
        if GROUPED in {one.name for one in found.forward} or not any(one.is_attention for one in found.forward):
            return None
        made = {number: one for one in found.forward for number in one.written}
        wanted = [(number, size, one.by_memory) for one in found.backward for number, size in one.read.items()]
        while wanted:
            number, size, is_fused = wanted.pop()
            kernel = made.get(number)
            if number in saved or (is_fused and number in seen) or not (kernel or number == self._streams.get(place)):
                continue
            seen.add(number)
            if kernel is not None and is_fused and kernel.is_elementwise:
                wanted += [(*each, True) for each in kernel.read.items()]
            else:
                saved[number] = size if kernel is None else kernel.written[number]
        return _total(saved.values())

    def _drop_gradients(self) -> None:
        """Take back gradients of operands that no product of the backward computes: those of results that only choose
        something. A gradient is a product of the same size, first of all at the same place."""
        left = {place: Counter(one.size for one in found.backward) for place, found in self._places.items()}
        wanted: list[tuple[Place, _Kernel, Operator, str]] = []
        for place, found in self._places.items():
            for one in found.forward:
                if one.operator is None or not one.is_product or one.name == CONVOLUTION:
                    continue
                left[place][one.size] -= one.operator.name in self._trained
                wanted += [(place, one, one.operator, name) for name in GRADIENTS if getattr(one.operator, name)]
        missing = [each for each in wanted if not _take(left[each[0]], each[1].size)]
        others = Counter[int]()
        for counter in left.values():
            others.update(counter)
        for _, one, operator, name in missing:
            if not _take(others, one.size):
                one.operator = replace(one.operator or operator, **{name: False})  # type: ignore[arg-type]

    def _of_place(self, found: _Place) -> Iterator[Operator]:
        again, last = found.forward[: found.num_rerun], found.forward[found.num_rerun :]
        yield self._others(again, found.backward, Rerun.ALWAYS)
        attention = [one for one in found.backward if one.is_attention]
        for number, kernel in enumerate(found.forward):
            if kernel.operator is None:
                continue
            rerun = Rerun.FULL if number < found.num_rerun else Rerun.NEVER
            one = replace(kernel.operator, rerun=rerun)
            if not kernel.is_product:
                forward = Kernels(moved=kernel.moved)
                backward = Kernels(moved=_total(x.moved for x in attention))
                one = replace(one, forward=forward, backward=backward, fused_forward=forward, fused_backward=backward,
                              kept=_total(kernel.written.values()))  # fmt: skip
                attention = []
            yield one
        if any(one.by_memory for one in last):
            yield self._others(last, [], Rerun.NEVER)

    def _others(self, forward: Sequence[_Kernel], backward: Sequence[_Kernel], rerun: Rerun) -> Operator:
        """Return an operator of the kernels that are bound by memory."""
        return Operator(
            OTHERS,
            OperatorKind.MEMORY,
            forward=_kernels(forward),
            backward=_kernels(backward),
            fused_forward=self._fused(forward),
            fused_backward=self._fused(backward),
            rerun=rerun,
            kept=_total(size for one in forward if one.name == CHOICE for size in one.written.values()),
        )

    def _fused(self, kernels: Sequence[_Kernel]) -> Kernels:
        """Return one kernel for those between two products."""
        found = []
        for by_memory, group in groupby(kernels, lambda one: one.by_memory):
            chain = list(group) if by_memory else []
            read, written = Sizes(), Sizes()
            for one in chain:
                read |= {number: size for number, size in one.read.items() if number not in written}
                written |= one.written
            later = [size for number, size in written.items() if self._last_read.get(number, -1) > chain[-1].number]
            moved = _total([*read.values(), *later])
            found += [Kernels(1, moved, moved_once=_total(one.once for one in chain))] if moved != Saved() else []
        return sum(found, Kernels())


def _as_saved(x: Tensor, elements: float) -> Saved:
    if not x.is_floating_point():
        return Saved(fixed_bytes=elements * x.element_size())
    return Saved(full=elements) if _is_narrow(x) else Saved(wide_full=elements)


def _take(pool: Counter[int], size: int) -> bool:
    """Take one of a size, and return whether there was any."""
    found = pool[size] > 0
    pool[size] -= found
    return found


def _operands(name: str, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    first, second = (args[1:] if name.startswith(("addm", "baddbmm")) else args)[:2]
    return first, second


def _kernels(kernels: Sequence[_Kernel]) -> Kernels:
    """Return the kernels that are bound by memory, run eagerly."""
    plain = [one for one in kernels if one.by_memory and not one.is_cast]
    casts = [one for one in kernels if one.is_cast]
    # A cast counts the elements of one side, whichever is narrow.
    cast = Saved(full=sum(one.moved.full for one in casts))
    return Kernels(
        len(plain), _total(one.moved for one in plain), len(casts), cast, moved_once=_total(one.once for one in plain)
    )


def _total(sizes: Iterable[Saved], times: float = 1.0) -> Saved:
    found = sum(sizes, Saved())
    return Saved(*(times * one for one in vars(found).values()))


def _is_narrow(x: Tensor) -> bool:
    return x.is_floating_point() and x.element_size() <= 2


def _order(size: Saved) -> float:
    return math.fsum(vars(size).values())
