"""The references with known faults of experts that a failed proof is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.family import TrainingData
from meshwright.models.contract.task import Reference
from meshwright.nn.step_handles import auxiliary_losses
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.record import faulty_experts as faulty
from meshwright.prove.record.evidence import Variant
from meshwright.prove.record.faulty_experts import Change, FaultyExperts, RowMask
from meshwright.prove.record.reference_run import compute_reference

LOST = "lost on their way back: the all-to-all of the combine, or its row counts"


@dataclass(frozen=True)
class _Known:
    """A known fault: how the reference is changed, and what is wrong with a layout that computes the same."""

    what: str
    cause: str
    change: Change
    ranks_a_cell: int = 1
    is_linear: bool = False


class ExpertVariants:
    """Faulty references of a model with experts."""

    def __init__(self, config: RunConfig, data: TrainingData, experts: ExpertPlacement, *, num_steps: int) -> None:
        self._config, self._data, self._experts, self._num_steps = config, data, experts, num_steps

    def of_first_step(self) -> Iterator[Variant]:
        """Yield variants that differ in step 1, the most common faults first."""
        for known in (
            *self._weights(),
            *self._rows(),
            *self._gradients(),
            *self._stale(),
            *self._choices(),
            *self._shared(),
            *self._auxiliary(),
        ):
            yield self._run(known, num_steps=1)

    def of_later_steps(self) -> Iterator[Variant]:
        """Yield variants that differ once a balancing bias has changed."""
        for known in self._biases():
            yield self._run(known, num_steps=self._num_steps)

    def _run(self, known: _Known, *, num_steps: int) -> Variant:
        evidence = compute_reference(
            self._config,
            self._data,
            num_steps=num_steps,
            change=known.change,
            ranks_a_cell=known.ranks_a_cell,
            samples_of=self._samples,
        )
        return Variant(known.what, known.cause, evidence, known.is_linear)

    @cached_property
    def _samples(self) -> Reference:
        return self._config.family.reference(run_facts(self._config), self._data)

    @cached_property
    def _plain(self) -> nn.Module:
        return build_part(self._config.family, run_facts(self._config), dtype=torch.float64)

    @property
    def _damage(self) -> FaultyExperts:
        return FaultyExperts(
            self._experts, self._config.mesh.axes().data_parallel(), self._config.train.num_microbatches
        )

    def _weights(self) -> Iterator[_Known]:
        squared = faulty.change_weights(lambda weights_r: weights_r * weights_r)
        yield _Known("routing weights squared", "routing weights are applied twice", self._damage.rows(squared))
        ones = faulty.change_weights(lambda weights_r: 0.0 * weights_r + 1.0)
        yield _Known("routing weights of 1", "routing weights are not applied", self._damage.rows(ones))
        if auxiliary_losses(self._plain):
            yield _Known(
                "routing weights of 1 and no gradient of auxiliary losses, which are attached to them",
                "routing weights are not applied",
                self._damage.rows(faulty.change_weights(torch.ones_like)),
            )

    def _rows(self) -> Iterator[_Known]:
        damage, size = self._damage, self._experts.size
        drop: list[tuple[str, str, RowMask]] = [
            ("no experts' outputs", "rows are dropped at combine", faulty.every_row)
        ]
        if size > 1:
            drop += [("no outputs of experts on other ranks", f"rows of other ranks are {LOST}", faulty.remote_rows)]
            drop += [
                (
                    f"no outputs of {self._experts_of(position)}",
                    f"rows from ep rank {position} are {LOST}",
                    faulty.rows_of_owner(position),
                )
                for position in range(size)
            ]
        for what, cause, mask in drop:
            yield _Known(what, cause, damage.rows(faulty.drop_outputs(mask)))
        yield _Known(
            "no output for the last row of each expert",
            "the last row of each expert is missing: offsets of the groups of rows are off by one",
            damage.rows(faulty.drop_outputs(faulty.last_rows)),
            ranks_a_cell=size,
        )
        yield from self._misrouted()
        for shift, whose in ((1, "previous"), (-1, "next")):
            cause = f"rows are combined into the wrong tokens: each token gets the outputs of the {whose} one"
            yield _Known(f"the outputs of the {whose} token", cause, damage.shift_results(shift))

    def _misrouted(self) -> Iterator[_Known]:
        experts, damage = self._experts, self._damage
        num, local = experts.num_experts, experts.num_local
        for a, b in itertools.combinations(range(experts.size), 2):
            other = {a: b, b: a}
            table = [other.get(e // local, e // local) * local + e % local for e in range(num)]
            what = f"tokens of {self._experts_of(a)} and of {self._experts_of(b)} exchanged"
            yield _Known(what, f"the experts of ep ranks {a} and {b} are swapped", damage.reroute(table))
        by_rank = {local, num - local} if experts.size > 2 else set()  # with two ranks, these are exchanged
        for shift in sorted({1, num - 1} | by_rank if num > 1 else ()):
            away = f"{shift}" if 2 * shift <= num else f"−{num - shift}"
            yield _Known(
                f"tokens of expert e computed by expert e {'+' if 2 * shift <= num else '−'} {away.strip('−')}",
                f"the offset of the experts' indices is wrong by {away}",
                damage.reroute([(e + shift) % num for e in range(num)]),
            )

    def _gradients(self) -> Iterator[_Known]:
        if self._experts.size == 1:
            return
        damage, remote = self._damage, faulty.remote_rows
        yield _Known(
            "no gradient of routing weights from experts on other ranks",
            "the router's gradient comes from each rank's own experts only: "
            "gradients of routing weights are not returned to the tokens' ranks",
            damage.rows(faulty.lose_weight_gradients(remote)),
        )
        yield _Known(
            "no gradient of rows from experts on other ranks",
            "gradients of rows are not returned to the tokens' ranks: the backward of the dispatch's all-to-all",
            damage.rows(faulty.lose_row_gradients(remote)),
        )
        yield _Known(
            "no gradient of outputs to experts on other ranks",
            "experts get gradients of their own rank's tokens only: the backward of the combine's all-to-all",
            damage.lose_output_gradients(remote),
        )

    def _stale(self) -> Iterator[_Known]:
        if self._config.train.num_microbatches == 1:
            return
        yield _Known(
            "each micro-batch given the experts' outputs of the one before it",
            "combine returns rows of the previous micro-batch's dispatch: a stale buffer, or stale splits",
            self._damage.stale_results(),
        )
        yield _Known(
            "each micro-batch routed as the one before it",
            "stale routing: a micro-batch uses the chosen experts of the one before it",
            self._damage.stale_choices(),
        )

    def _choices(self) -> Iterator[_Known]:
        routers = [layer.router.config for layer in faulty.layers(self._plain)]
        if any(config.capacity_factor is not None for config in routers):
            yield _Known(
                "tokens over capacity kept",
                "tokens over an expert's capacity are computed instead of dropped",
                faulty.keep_dropped,
            )
            yield _Known(
                "capacity counted over a micro-batch",
                "capacity is counted over each rank's micro-batch instead of over each sample",
                faulty.change_choices(faulty.share_capacity),
            )
        if any(config.balance_loss for config in routers):
            over_batch = any(config.over_batch for config in routers)
            due = "the global batch's" if over_batch else "each sample's"
            yield _Known(
                "the balance loss of each micro-batch's load",
                f"the balance loss counts the load of each rank's micro-batch instead of {due}",
                faulty.change_choices(faulty.count_microbatch),
            )
            if over_batch:
                yield _Known(
                    "the balance loss of each sample's load",
                    f"the balance loss counts the load of each sample instead of {due}",
                    faulty.change_choices(faulty.count_sample),
                )

    def _shared(self) -> Iterator[_Known]:
        if any(layer.shared is not None for layer in faulty.layers(self._plain)):
            yield _Known("no outputs of shared experts", "shared experts are left out", faulty.scale_shared(0.0))

    def _auxiliary(self) -> Iterator[_Known]:
        handles = auxiliary_losses(self._plain)
        for name in sorted({handle.name for _, handle in handles}):
            of_name = frozenset(path for path, handle in handles if handle.name == name)
            yield _without(of_name, f"the {name} loss")
            if len(of_name) > 1:
                for path in sorted(of_name):
                    yield _without(frozenset([path]), f"the {name} loss of {path.rpartition('.')[0]}")

    def _biases(self) -> Iterator[_Known]:
        if not any(layer.router.config.bias_rate for layer in faulty.layers(self._plain)):
            return
        yield _Known(
            "the balancing bias in the routing weights",
            "the balancing bias enters the routing weights; it may only change the choice of experts",
            faulty.add_bias_to_weights,
        )
        yield _Known(
            "no balancing bias in the choice of experts",
            "the balancing bias is updated, but not added to the scores that experts are chosen by",
            faulty.ignore_bias,
        )

    def _experts_of(self, position: int) -> str:
        local = self._experts.num_local
        return self._experts.describe(range(position * local, (position + 1) * local))


def _without(paths: frozenset[str], what: str) -> _Known:
    def remove(model: nn.Module) -> None:
        for path, handle in auxiliary_losses(model):
            if path in paths:
                handle.weight = 0.0

    return _Known(what, "", remove, is_linear=True)
