"""Known faults of layers with experts, as changes of the reference model.

Each change damages the plain module in one process, so a layout that computes the same as a changed reference has that
fault. Used only to diagnose a failed proof.

Shapes: b samples, t tokens, k experts per token, r rows, d model width, e experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.nn.experts.layer import Dispatch, Dispatcher, ExpertRows, MixtureOfExperts
from meshwright.nn.experts.router import Router, Routing, drop_over_capacity
from meshwright.nn.kept_results import ForwardCache
from meshwright.prove.placement import ExpertPlacement

Change = Callable[[nn.Module], None]
RowMask = Callable[["RowView"], Tensor]
RowChange = Callable[[ExpertRows, "RowView"], ExpertRows]


@dataclass(frozen=True)
class Cell:
    """Micro-batch of a data-parallel rank that a forward computes."""

    dp_rank: int
    microbatch: int


class CellCounter:
    """Count of the forwards that a backward follows: one per cell, in order of ranks, then micro-batches."""

    def __init__(self, num_ranks: int, num_microbatches: int) -> None:
        self._num_ranks, self._num_microbatches, self._next = num_ranks, num_microbatches, 0

    def advance(self) -> Cell:
        """Return the cell of the current forward; the first one for a forward without a backward."""
        cell = Cell(*divmod(self._next, self._num_microbatches))
        if torch.is_grad_enabled():
            self._next = (self._next + 1) % (self._num_ranks * self._num_microbatches)
        return cell


@dataclass(frozen=True)
class RowView:
    """Rows of one dispatch, and where they come from."""

    sizes: list[int]
    """Rows of each expert."""
    cell: Cell
    experts: ExpertPlacement

    def owners(self) -> Tensor:
        """Return the position in its group of the rank that computes each row."""
        owner_e = torch.arange(len(self.sizes)) // self.experts.num_local
        return owner_e.repeat_interleave(torch.tensor(self.sizes))


def every_row(view: RowView) -> Tensor:
    """Select all rows."""
    return torch.ones(sum(view.sizes), dtype=torch.bool)


def remote_rows(view: RowView) -> Tensor:
    """Select the rows that another rank computes."""
    return view.owners() != view.experts.position(view.cell.dp_rank)


def rows_of_owner(position: int) -> RowMask:
    """Select the rows that the rank at this position of a group computes."""
    return lambda view: view.owners() == position


def last_rows(view: RowView) -> Tensor:
    """Select the last row of each expert."""
    ends = torch.tensor([size for size in view.sizes if size]).cumsum(0)
    return torch.zeros(sum(view.sizes), dtype=torch.bool).index_fill(0, ends - 1, True)


def _where(mask_r: Tensor, changed: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask_r.view(-1, *[1] * (x.dim() - 1)), changed, x)


def drop_outputs(mask: RowMask) -> RowChange:
    """Leave out the experts' outputs of some rows; an output is proportional to its routing weight."""
    return lambda rows, view: replace(
        rows, weights_r=_where(mask(view), torch.zeros_like(rows.weights_r), rows.weights_r)
    )


def change_weights(weights: Callable[[Tensor], Tensor]) -> RowChange:
    """Change the routing weights of all rows."""
    return lambda rows, view: replace(rows, weights_r=weights(rows.weights_r))


def lose_weight_gradients(mask: RowMask) -> RowChange:
    """Return no gradient of the routing weights of some rows."""
    return lambda rows, view: replace(rows, weights_r=_where(mask(view), rows.weights_r.detach(), rows.weights_r))


def lose_row_gradients(mask: RowMask) -> RowChange:
    """Return no gradient of some rows to the tokens."""
    return lambda rows, view: replace(rows, rows_rd=_where(mask(view), rows.rows_rd.detach(), rows.rows_rd))


class _FaultyDispatcher(Dispatcher):
    """A dispatcher that changes the rows that experts get, or the outputs that tokens get."""

    def __init__(self, inner: Dispatcher, cells: CellCounter, experts: ExpertPlacement) -> None:
        self.inner, self.cells, self.experts = inner, cells, experts
        self.reroute: Callable[[Tensor], Tensor] = lambda experts_nk: experts_nk
        self.rows: RowChange = lambda rows, view: rows
        self.keeps_output_gradient: RowMask | None = None
        self.result: Callable[[Tensor, Cell], Tensor] = lambda out_nd, cell: out_nd

    def start(self, x_nd: Tensor, routing: Routing, cache: ForwardCache) -> Dispatch:
        """Start a dispatch with other experts."""
        rerouted = replace(routing, experts_nk=self.reroute(routing.experts_nk))
        return _FaultyDispatch(self, self.inner.start(x_nd, rerouted, cache), self.cells.advance())


class _FaultyDispatch(Dispatch):
    def __init__(self, owner: _FaultyDispatcher, inner: Dispatch, cell: Cell) -> None:
        self._owner, self._inner, self._cell = owner, inner, cell

    def send(self) -> None:
        self._inner.send()

    def receive(self) -> ExpertRows:
        rows = self._inner.receive()
        return self._owner.rows(rows, self._view(rows))

    def _view(self, rows: ExpertRows) -> RowView:
        return RowView(rows.groups.sizes, self._cell, self._owner.experts)

    def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
        keeps = self._owner.keeps_output_gradient
        if keeps is not None:
            out_rd = _where(keeps(self._view(rows)), out_rd, out_rd.detach())
        self._inner.combine(rows, out_rd)

    def finish(self) -> Tensor:
        return self._owner.result(self._inner.finish(), self._cell)


class FaultyExperts:
    """Changes of a model's layers with experts, for micro-batches computed in the order of `CellCounter`."""

    def __init__(self, experts: ExpertPlacement, num_ranks: int, num_microbatches: int) -> None:
        self._experts, self._num_ranks, self._num_microbatches = experts, num_ranks, num_microbatches

    def cells(self) -> CellCounter:
        """Return a new counter for one layer."""
        return CellCounter(self._num_ranks, self._num_microbatches)

    def dispatch(self, change: Callable[[_FaultyDispatcher], None]) -> Change:
        """Change the dispatcher of every layer."""

        def apply(model: nn.Module) -> None:
            for layer in layers(model):
                layer.dispatcher = _FaultyDispatcher(layer.dispatcher, self.cells(), self._experts)
                change(layer.dispatcher)

        return apply

    def rows(self, change: RowChange) -> Change:
        """Change the rows that experts get."""
        return self.dispatch(lambda dispatcher: setattr(dispatcher, "rows", change))

    def lose_output_gradients(self, mask: RowMask) -> Change:
        """Return no gradient of some rows' outputs to the experts."""
        return self.dispatch(lambda one: setattr(one, "keeps_output_gradient", lambda view: ~mask(view)))

    def reroute(self, expert_e: Iterable[int]) -> Change:
        """Send the tokens of each expert to another expert."""
        table = torch.tensor([*expert_e, self._experts.num_experts])  # the last one stands for a dropped choice
        return self.dispatch(lambda one: setattr(one, "reroute", lambda experts_nk: table[experts_nk]))

    def shift_results(self, num_tokens: int) -> Change:
        """Give each token the outputs of one that is so many places before it."""
        return self.dispatch(lambda one: setattr(one, "result", lambda out_nd, cell: out_nd.roll(num_tokens, 0)))

    def stale_results(self) -> Change:
        """Give each micro-batch but the first the outputs of the one before it."""

        def change(dispatcher: _FaultyDispatcher) -> None:
            last: list[Tensor] = []

            def result(out_nd: Tensor, cell: Cell) -> Tensor:
                stale = last[0] if cell.microbatch and last else out_nd.detach()
                last[:] = [out_nd.detach()]
                return out_nd + (stale - out_nd).detach()  # the backward knows nothing of the stale values

            dispatcher.result = result

        return self.dispatch(change)

    def stale_choices(self) -> Change:
        """Route each micro-batch but the first as the one before it."""

        def apply(model: nn.Module) -> None:
            for layer in layers(model):
                layer.router.chosen.recall = _recall_previous(self.cells())  # type: ignore[method-assign,assignment]

        return apply


def _recall_previous(cells: CellCounter) -> Callable[[Callable[[], Any]], Any]:
    last: list[Any] = []

    def recall(compute: Callable[[], Any]) -> Any:
        cell = cells.advance()
        given = last[0] if cell.microbatch else compute()
        last[:] = [given]
        return given

    return recall


def layers(model: nn.Module) -> list[MixtureOfExperts]:
    """Return the layers with experts."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


Choice = tuple[Tensor, Tensor, Tensor]


class FaultyRouter(Router):
    """A router with the parameters and handles of another, and a fault."""

    def __init__(
        self,
        router: Router,
        choice: Callable[[Router, Choice], Choice] = lambda router, choice: choice,
        *,
        bias_in_weights: bool = False,
        bias_in_choice: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(router.__dict__)
        self._change, self._bias_in_weights, self._bias_in_choice = choice, bias_in_weights, bias_in_choice

    def _scores(self, logits_bte: Tensor) -> tuple[Tensor, Tensor]:
        scores_bte, probabilities_bte = super()._scores(logits_bte)
        return scores_bte + self.load.bias if self._bias_in_weights else scores_bte, probabilities_bte  # type: ignore[operator]

    def best(self, scores_bte: Tensor) -> Tensor:
        """Return what the fault makes of the choice, [b, t, k]."""
        if self._bias_in_weights or not self._bias_in_choice:
            scores_bte = scores_bte - self.load.bias  # type: ignore[operator]
        return super().best(scores_bte)

    def _choose(self, scores_bte: Tensor) -> Choice:
        return self._change(self, super()._choose(scores_bte))


def change_routers(make: Callable[[Router], Router]) -> Change:
    """Replace the router of every layer."""

    def apply(model: nn.Module) -> None:
        for layer in layers(model):
            layer.router = make(layer.router)

    return apply


def change_choices(change: Callable[[Router, Choice], Choice]) -> Change:
    """Change the chosen experts, whether they have a slot, and the counts for the balance loss."""
    return change_routers(lambda router: FaultyRouter(router, change))


def add_bias_to_weights(model: nn.Module) -> None:
    """Take routing weights from the scores with the balancing bias."""
    change_routers(lambda router: FaultyRouter(router, bias_in_weights=True))(model)


def ignore_bias(model: nn.Module) -> None:
    """Choose experts without the balancing bias."""
    change_routers(lambda router: FaultyRouter(router, bias_in_choice=False))(model)


def keep_dropped(model: nn.Module) -> None:
    """Compute choices over an expert's capacity, too."""
    for layer in layers(model):
        layer.router.config = replace(layer.router.config, capacity_factor=None)


def share_capacity(router: Router, choice: Choice) -> Choice:
    """Count an expert's slots over the micro-batch instead of over each sample."""
    experts_btk, _, counts_be = choice
    num_samples, num_tokens = experts_btk.shape[:2]
    capacity = router.config.capacity(num_tokens)
    assert capacity is not None, "only a layer with a capacity has slots"
    flat = experts_btk.reshape(1, num_samples * num_tokens, -1)
    kept = drop_over_capacity(flat, router.config.num_experts, capacity * num_samples)
    return experts_btk, kept.view_as(experts_btk), counts_be


def count_microbatch(router: Router, choice: Choice) -> Choice:
    """Balance the load of the micro-batch instead of each sample's."""
    counts_be = choice[2].double()
    return choice[0], choice[1], _own_counts(choice[0], router).mean(0, keepdim=True).expand_as(counts_be)


def count_sample(router: Router, choice: Choice) -> Choice:
    """Balance the load of each sample."""
    return choice[0], choice[1], _own_counts(choice[0], router)


def _own_counts(experts_btk: Tensor, router: Router) -> Tensor:
    hot = torch.nn.functional.one_hot(experts_btk, router.config.num_experts)
    return hot.sum((1, 2)).double()


def scale_shared(factor: float) -> Change:
    """Scale the outputs of shared experts."""

    def apply(model: nn.Module) -> None:
        for layer in layers(model):
            if layer.shared is not None:
                layer.shared.down.register_forward_hook(lambda module, inputs, out: out * factor)

    return apply
