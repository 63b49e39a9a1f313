"""Results of a first forward that its recomputation takes: those that selective recomputation keeps, and values that no
forward may compute twice.

Selective recomputation keeps matrix products, attention, top-k and collectives (Korthikanti et al. 2022, section 5,
keeps the same but attention, which fused kernels make cheap to keep). A dispatch mode stores each kept operator's
results in order in the first forward, and another returns them in the recomputed one, which thus multiplies and
communicates nothing twice. A result that the block then writes to in place, such as a product that a bias is added to,
is copied first. Tensor subclasses are unwrapped first: what is kept are the local results of DTensor's
operators, and those of the collectives inside them.

`torch.utils.checkpoint` has such modes, too, which `torch.compile` understands; compiled blocks use them. They count
all operators by position, so a forward that skips work when it is recomputed would get wrong results, and they run the
collectives inside DTensor's operators again.

A `ForwardCache` holds chosen experts, and rows received from other ranks: choosing again could change shapes after an
update of a bias, and receiving again would repeat a collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.errors import LayoutError
from meshwright.nn.private import TorchDispatchMode, detached, num_changes, storage_of, written_by
from meshwright.nn.step_handles import StepHandle

MATRIX_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
    )
)  # fmt: skip
"""Matrix products and attention of ATen."""
ATTENTION = frozenset({"meshwright::block_attention", "torch_attn::_varlen_attn"})
"""Attention that is an operator of its own. Compiled FlexAttention is none, and is computed again."""
CHOICES = frozenset({"aten::topk"})
"""Indices that would change with the parameters."""
OTHERWISE = "recompute.policy=full recompute.blocks=[]"
"""Settings that keep no result of any block."""
COLLECTIVES = frozenset({"meshwright::all_to_all_start"})
"""Functional collectives outside `FUNCTIONAL_COLLECTIVES`."""
FUNCTIONAL_COLLECTIVES = "_c10d_functional"
"""Namespace of PyTorch's functional collectives, of which those that end in `_` work in place.

Waits are not kept. Waiting for a kept result again does nothing, and how often a block waits differs between its
forwards: an input that was pending in the first one no longer is.
"""


@cache
def is_kept(operator: Any) -> bool:
    """Return whether the results of an operator are kept."""
    name: str = operator.name()
    namespace, _, base = name.partition(".")[0].partition("::")
    if namespace == FUNCTIONAL_COLLECTIVES:
        return not base.endswith("_") and not base.startswith("wait_")
    kept = MATRIX_PRODUCTS | ATTENTION | CHOICES | COLLECTIVES
    return not name.endswith((".out", "_out")) and f"{namespace}::{base}" in kept


def compiled_policy(context: Any, operator: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
    """Return the policy of an operator, for `create_selective_checkpoint_contexts` in compiled blocks."""
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


class _Kept(NamedTuple):
    result: Any
    changes: tuple[int, ...]
    is_copy: bool = False
    """Whether the block wrote to its own result afterwards, as its recomputation will."""

    @classmethod
    def of(cls, result: Any, *, copy: bool = False) -> _Kept:
        kept = _kept_of(result, copy=copy)
        return cls(kept, tuple(num_changes(x) for x in _tensors(kept)), copy)


class KeptResults:
    """Kept results of one forward, by operator, in order."""

    def __init__(self) -> None:
        self._results: defaultdict[Any, list[_Kept]] = defaultdict(list)
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep nothing: a recomputed forward skips what runs in this context."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def put(self, operator: Any, result: Any) -> None:
        """Keep an operator's result."""
        if not self._is_paused:
            self._results[operator].append(_Kept.of(result))

    def copy_before_writes(self, written: list[Any]) -> None:
        """Copy kept results, given the tensors that an operator of the block is about to write to."""
        storages = {storage_of(x) for x in _tensors(written)}
        for results in self._results.values():
            for number, kept in enumerate(results):
                if not kept.is_copy and storages & {storage_of(x) for x in _tensors(kept.result)}:
                    results[number] = _Kept.of(kept.result, copy=True)

    def get(self, operator: Any, number: int) -> Any:
        """Return the result of an operator's call, counted from 0, without its graph.

        Raises:
            LayoutError: the forward had fewer calls, or others modified the result afterwards.
        """
        results, name = self._results[operator], operator.name()
        if number >= len(results):
            raise LayoutError(
                f"a recomputed block calls {name} {number + 1} times, but its forward called it {len(results)} times",
                rule="a recomputed forward runs the operators of the first one",
                fix=OTHERWISE,
            )
        result, changes, is_copy = results[number]
        if tuple(num_changes(x) for x in _tensors(result)) != changes:
            raise LayoutError(
                f"the result of {name} in a selectively recomputed block was modified in place outside the block",
                rule="kept results stay as they are until the backward",
                fix=f"return a new tensor from the block, or set {OTHERWISE}",
            )
        return _kept_of(result, copy=is_copy)

    def tensors(self) -> list[Tensor]:
        """Return all kept tensors."""
        return [x for results in self._results.values() for kept in results for x in _tensors(kept.result)]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions in the block stay compiled: FlexAttention otherwise computes all scores."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator: one whose results are kept as the mode does, if its arguments are plain tensors."""
        subclasses = [one for one in types if one.__torch_dispatch__ is not Tensor.__torch_dispatch__]
        if any(hasattr(one, "__tensor_flatten__") for one in subclasses):
            return NotImplemented  # until one such as DTensor or a pending collective runs operators on plain tensors
        # Other subclasses are such as the fake tensors with which DTensor propagates shardings, once per shape.
        run = func if subclasses or not is_kept(func) else partial(self.run_kept, func)
        return run(*args, **(kwargs or {}))

    def run_kept(self, func: Any, *args: Any, **named: Any) -> Any:
        """Run an operator whose results are kept."""
        raise NotImplementedError


class KeepingMode(_Mode):  # type: ignore[no-untyped-call]
    """Mode of a forward whose results are kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, which may write to results that are kept."""
        if written := written_by(func, args, kwargs or {}):
            self._kept.copy_before_writes(written)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run_kept(self, func: Any, *args: Any, **named: Any) -> Any:
        """Run an operator, and keep its result."""
        result = func(*args, **named)
        self._kept.put(func, result)
        return result


class RecallingMode(_Mode):  # type: ignore[no-untyped-call]
    """Mode of a recomputed forward, which returns kept results."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__(kept)
        self._num_calls: defaultdict[Any, int] = defaultdict(int)

    def __enter__(self) -> RecallingMode:
        self._num_calls.clear()  # a second backward over the same graph starts from the first result again
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def run_kept(self, func: Any, *args: Any, **named: Any) -> Any:
        """Return an operator's kept result."""
        self._num_calls[func] += 1
        return self._kept.get(func, self._num_calls[func] - 1)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, tuple | list):
        return [x for one in result for x in _tensors(one)]
    return [result] if isinstance(result, Tensor) else []


def _kept_of(result: Any, *, copy: bool) -> Any:
    """Return a result to keep, or to give to a recomputed forward, without its graph."""
    if isinstance(result, tuple | list):
        return type(result)(_kept_of(one, copy=copy) for one in result)
    if not isinstance(result, Tensor):
        return result
    return result.detach().clone() if copy else detached(result)


T = TypeVar("T", bound=tuple[Any, ...])


class ForwardCache(StepHandle):
    """Cache of values of one forward, to be returned again when the forward is recomputed.

    Without recomputation (`nn/recompute.py`) it computes every value and keeps none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source: Iterator[tuple[Any, ...]] | None = None
        """Values of the forward that is being recomputed."""
        self.sinks: tuple[list[tuple[Any, ...]], ...] = ()
        """Where values of the current forward are kept: one list per recomputed module that it runs in."""
        self.kept: tuple[KeptResults, ...] = ()
        """Kept results of the selectively recomputed modules that the current forward runs in."""

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Context of work that a recomputed forward skips, because it recalls what comes of it.

        Selective recomputation then keeps no results of it. `recall` is such a context itself.
        """
        with ExitStack() as stack:
            for kept in self.kept:
                stack.enter_context(kept.paused())
            yield

    def recall(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, or in a recomputed forward the tuple that it returned in the first one.

        Recalled tensors are detached, and require gradients if they did, so that autograd saves what it saved before.
        """
        values: Any
        if self.source is None:
            with self.skipped():
                values = compute()
        else:
            values = _leaves(next(self.source))
        for sink in self.sinks:
            sink.append(_leaves(values))
        result: T = values
        return result


def _leaves(values: tuple[Any, ...]) -> tuple[Any, ...]:
    # A tensor with its graph would keep the graph alive in a cycle that Python's collector can't see.
    return tuple(x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in values)
