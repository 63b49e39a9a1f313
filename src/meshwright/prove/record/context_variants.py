"""The references with known faults of context parallelism that a failed proof is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import TrainingData
from meshwright.prove.placement import ContextPlacement
from meshwright.prove.record.evidence import Variant
from meshwright.prove.record.faulty_context import ContextFault, MaskOfSamples, TokenIndex
from meshwright.prove.record.reference_run import compute_reference
from meshwright.prove.record.token_reference import TokenReference
from meshwright.prove.record.token_table import TokenTable


@dataclass(frozen=True)
class _Known:
    what: str
    cause: str
    fault: ContextFault


class ContextVariants:
    """Faulty references of a model whose tokens are sharded over cp."""

    def __init__(self, config: RunConfig, data: TrainingData, placement: ContextPlacement) -> None:
        self._config, self._data, self._placement = config, data, placement
        self._size, self._packed = config.mesh.cp, config.data.packing != "none"

    def of_first_step(self) -> Iterator[Variant]:
        """Yield variants that differ in step 1: faults of all ranks, then those of one."""
        if self._packed:
            yield self._run(_Known("whole samples instead of one document at a time", WHOLE, ContextFault()))
        known = [*self._positions(), *self._masks(), *self._gradients(), *self._tokens()]
        for one in known:
            yield self._run(one)
        for rank in range(self._size) if self._size > 2 else ():
            lost = f"keys and values of cp rank {rank} don't reach the other cp ranks, or are not merged there"
            what = f"attention without the keys of {self._placement.describe(rank)} on other ranks"
            yield self._run(_Known(what, lost, ContextFault(mask=_without_keys_of(rank))))
        for one, rank in itertools.product(known, range(self._size)):
            if one.fault.rank is None:
                what = f"{one.what} on {self._placement.describe(rank)}"
                yield self._run(_Known(what, one.cause, replace(one.fault, rank=rank)))
        for one in self._of_other_ranks():
            yield self._run(one)

    def of_later_steps(self) -> Iterator[Variant]:
        """Yield nothing: faults of context parallelism differ in step 1."""
        yield from ()

    def _run(self, known: _Known) -> Variant:
        samples = TokenReference(self._config, self._data, self._placement, known.fault)
        evidence = compute_reference(self._config, self._data, num_steps=1, samples_of=samples)
        return Variant(known.what, known.cause, evidence)

    def _positions(self) -> Iterator[_Known]:
        yield _Known(
            "RoPE at positions that count from 0 on each cp rank",
            "RoPE uses local positions: places in the cp rank's shard instead of positions in the sample",
            ContextFault(positions=lambda table: table.place_bt),
        )
        yield _Known(
            "RoPE at positions of a contiguous order over cp",
            "RoPE uses positions of consecutive tokens, but the cp ranks hold the tokens in a balanced order",
            ContextFault(positions=lambda table: _position(table, table.contiguous_bt())),
        )

    def _masks(self) -> Iterator[_Known]:
        for what, cause, mask in MASKS:
            yield _Known(what, cause, ContextFault(mask=mask))
            yield _Known(f"{what}, among those received", cause, ContextFault(mask=_received(mask)))
        if self._packed:
            ignored = "documents are ignored under cp: tokens attend across documents"
            unmasked: Callable[[MaskOfSamples], Tensor] = lambda mask: mask.visible_bqk(documents=None)  # noqa: E731
            yield _Known("the mask without documents", ignored, ContextFault(mask=unmasked))
            yield _Known(
                "the mask and RoPE without documents",
                f"{ignored}, and positions don't start again in each",
                ContextFault(mask=unmasked, positions=TokenTable.own_bt),
            )
            yield _Known(
                "the mask without documents for keys of other cp ranks",
                f"{ignored}, where keys are on another cp rank",
                ContextFault(mask=_on_other_ranks(unmasked)),
            )

    def _gradients(self) -> Iterator[_Known]:
        tensors = (("keys and values", 0, 0), ("keys", 0, None), ("values", None, 0))
        for (tensor, keys, values), (times, what, how) in itertools.product(tensors, GRADIENT_TIMES):
            yield _Known(
                f"{what} of {tensor} from queries on other cp ranks",
                f"gradients of {tensor} are {how} to the cp rank that owns them",
                ContextFault(
                    key_gradient=1.0 if keys is None else times, value_gradient=1.0 if values is None else times
                ),
            )

    def _tokens(self) -> Iterator[_Known]:
        orders = (("a contiguous order over cp", _contiguous), ("a reversed order of the cp rank's tokens", _reversed),
                  ("an order of the cp rank's tokens with its halves swapped", _halves_swapped))  # fmt: skip
        for name, index in orders:
            for what, fault in _readings(index):
                apart = "" if what == "inputs and targets" else "inputs and targets of cp ranks are sharded apart: "
                wrong = f"{what} are in {name}, not in that of masks and positions"
                yield _Known(f"{what} in {name}", f"{apart}{wrong}", fault)

    def _of_other_ranks(self) -> Iterator[_Known]:
        for rank, other in itertools.permutations(range(self._size), 2):
            for what, fault in _readings(_of_rank(other)):
                held = f"{self._placement.describe(rank)} holds the tokens of cp rank {other}, which are there twice"
                known = _Known(f"{what} of cp rank {other} on {self._placement.describe(rank)}", held, fault)
                yield replace(known, fault=replace(fault, rank=rank))
            if self._size > 2:
                yield _Known(
                    f"attention on {self._placement.describe(rank)} without the keys of cp rank {other}",
                    f"keys and values of cp rank {other} don't reach cp rank {rank}, or are not merged there",
                    ContextFault(mask=_without_keys_of(other), rank=rank),
                )
            yield _Known(
                f"inputs, targets and positions of cp rank {other} on {self._placement.describe(rank)}",
                f"{self._placement.describe(rank)} holds the tokens of cp rank {other} with their positions",
                ContextFault(_of_rank(other), _of_rank(other), _positions_of(other), rank=rank),
            )


WHOLE = "documents of a sample, or its padding, affect each other outside of attention"


def _position(table: TokenTable, index_bt: Tensor) -> Tensor:
    """Return positions in documents of tokens that are believed to be at other indices."""
    return index_bt - table.starts_bt.expand(len(index_bt), -1).gather(1, index_bt)


def _positions_of(other: int) -> TokenIndex:
    return lambda table: _position(table, table.of_rank_bt(other))


def _of_rank(other: int) -> TokenIndex:
    return lambda table: table.of_rank_bt(other)


def _contiguous(table: TokenTable) -> Tensor:
    return table.contiguous_bt()


def _reversed(table: TokenTable) -> Tensor:
    return table.at_place_bt(torch.arange(table.tokens_Rbs.shape[2]).flip(0))


def _halves_swapped(table: TokenTable) -> Tensor:
    size = table.tokens_Rbs.shape[2]
    return table.at_place_bt(torch.arange(size).roll(size // 2))


def _readings(index: TokenIndex) -> Iterator[tuple[str, ContextFault]]:
    """Yield which of inputs and targets are read at an index."""
    yield "inputs and targets", ContextFault(index, index)
    yield "inputs", ContextFault(inputs=index)
    yield "targets", ContextFault(targets=index)


def _on_other_ranks(other: Callable[[MaskOfSamples], Tensor]) -> Callable[[MaskOfSamples], Tensor]:
    """Return a mask that is right for keys of the query's own rank only."""
    return lambda mask: torch.where(mask.table.is_shared_bqk(), mask.visible_bqk(), other(mask))


def _received(mask: Callable[[MaskOfSamples], Tensor]) -> Callable[[MaskOfSamples], Tensor]:
    """Return a mask of the keys that a ring sends."""
    return lambda samples: mask(samples) & samples.received_bqk()


def _without_keys_of(rank: int) -> Callable[[MaskOfSamples], Tensor]:
    return lambda mask: mask.visible_bqk() & (mask.table.is_shared_bqk() | (mask.table.rank_bt != rank)[:, None, :])


def _in_order_of_ranks(mask: MaskOfSamples) -> Tensor:
    rank_bt = mask.table.rank_bt
    earlier = rank_bt[:, :, None] > rank_bt[:, None, :]
    return earlier & mask.table.is_same_document_bqk()


GRADIENT_TIMES = (
    (0.0, "no gradient", "not returned"),
    (2.0, "twice the gradient", "returned twice"),
)
MASKS: tuple[tuple[str, str, Callable[[MaskOfSamples], Tensor]], ...] = (
    (
        "attention to keys of the same cp rank only",
        "queries miss the keys of other cp ranks: attention is local to each rank",
        lambda mask: mask.visible_bqk() & mask.table.is_shared_bqk(),
    ),
    (
        "the mask at local positions of cp ranks",
        "the mask is evaluated at local positions: places in the cp ranks' shards instead of positions in the sample",
        lambda mask: mask.visible_at(mask.table.place_bt),
    ),
    (
        "the mask at local positions for keys of other cp ranks",
        "the mask of keys from other cp ranks is evaluated at local positions instead of positions in the sample",
        _on_other_ranks(lambda mask: mask.visible_at(mask.table.place_bt)),
    ),
    (
        "the mask of a contiguous order over cp",
        "the mask takes the tokens of each cp rank for consecutive ones, but they are in a balanced order",
        lambda mask: mask.visible_at(mask.table.contiguous_bt()),
    ),
    (
        "all keys of earlier cp ranks seen, and none of later ones",
        "keys of other cp ranks are masked by the order of ranks, not of tokens",
        _on_other_ranks(_in_order_of_ranks),
    ),
    (
        "all keys of other cp ranks seen",
        "keys of other cp ranks are not masked: queries see later tokens",
        _on_other_ranks(MaskOfSamples.same_document_bqk),
    ),
    (
        "the mask without its window for keys of other cp ranks",
        "the window is ignored for keys of other cp ranks",
        _on_other_ranks(lambda mask: mask.visible_bqk(window=None)),
    ),
)
"""What is seen, the cause, and the keys [b, q, k] that each query sees."""
