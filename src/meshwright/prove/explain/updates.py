"""Causes of wrong updates: faults of the optimizer, each replayed on the gradients that the optimizer was given.

What it was given, and the learning rate, are recorded, so an update depends on nothing else. A fault is the cause of a
wrong parameter if its updates are those of all its wrong shards, in all steps; of the faults that are, the one that
explains most parameters is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from meshwright.prove.explain.contributions import is_significant
from meshwright.prove.explain.gradients import (
    incomplete,
    misplaced,
    non_finite,
    replicas_differ,
    unrecognised,
    wrong_mask,
)
from meshwright.prove.explain.optimizer_faults import DECAY, Hypothesis, hypotheses
from meshwright.prove.judge.judge import Comparison, due_factor, given_gradients, plain_rate
from meshwright.prove.judge.tensors import Array, max_magnitude, to_arrays
from meshwright.prove.judge.verdicts import SuspectTensor, wrong_names
from meshwright.prove.record.plain_optimizer import Replay, UpdateFault
from meshwright.prove.result import EVERYWHERE, Diagnosis, FaultKind, number_words, rank_words, scope_words
from meshwright.units import first_words

FIT = 1e-6
"""Largest residual of a fit, relative to the error."""
MIN_ROUNDED, NEARLY_ALL = 4, 0.98
"""Fewest changed weights to judge a dtype by, and the share of them that must be numbers of it: of right ones, one in
65,536 is a bfloat16 number by chance."""

MAX_SWAPPED = 6
"""Most wrong parameters of which pairs are tried that exchange states."""


@dataclass(frozen=True, eq=False)
class UpdateCauses:
    """Causes of the wrong updates of a comparison."""

    comparison: Comparison

    @cached_property
    def _wrong(self) -> dict[int, list[str]]:
        """Return wrong parameters by step, without those that have a cause of their own, up to the step where replicas
        differ: what is due after it isn't known."""
        found = {}
        for one in self.comparison.steps:
            trained = [name for name in wrong_names(one.updates) if name in self.comparison.sides.expected.roles]
            found[one.step] = [n for n in trained if self._own(one.step, n) is None]
            if any(verdict.suspect.large_mismatches for verdict in one.updates.values()):
                break
        return found

    def of(self, step: int, name: str) -> Diagnosis:
        """Return the cause of a wrong update of a step."""
        suspect, found = self.suspect(step, name), self._own(step, name)
        if found is None and (one := self._hypotheses.get(name)) is not None:
            found = Diagnosis(one.kind, f"{one.what} {self._scopes[one]}", one.cause)
        found = found or proportional(suspect, self._before(step, name)) or self._of_another_shard(step, name)
        found = found or replicas_differ(suspect)
        if found is not None:
            return found
        base = unrecognised(suspect)
        cause = f"{base.cause}; the gradients that the optimizer was given are right: check its step"
        return replace(base, cause=cause)

    def _of_another_shard(self, step: int, name: str) -> Diagnosis | None:
        """Return the cause if shards are changed by other shards' steps; each decays by itself."""
        suspect, before, sides = self.suspect(step, name), self._before(step, name), self.comparison.sides
        peak, decay = Replay(sides.train, sides.expected.roles).settings(name, torch.from_numpy(before))
        kept = before * (1 - decay * plain_rate(sides, step) * peak / sides.train.lr)
        shards = tuple(replace(s, value=s.value - s.slice_of(kept)) for s in suspect.assembly.shards)
        moved = replace(suspect, assembly=replace(suspect.assembly, shards=shards), expected=suspect.expected - kept)
        found = misplaced(moved, {name: moved.expected})
        if found is None:
            return None
        symptom = f"updated by the wrong step: {found.symptom}"
        return replace(found, symptom=symptom, cause=f"the steps that ranks compute: {found.cause}")

    def of_frozen(self, step: int, name: str) -> Diagnosis | None:
        """Return the cause if a parameter that isn't trained decays."""
        sides = self.comparison.sides
        suspect, before = self.comparison.steps[step - 1].updates[name].suspect, self._before(step, name)
        decayed = plain_rate(sides, step) * sides.train.weight_decay
        limit, due = suspect.tolerance * suspect.scale, before * (1 - decayed)
        if (
            not suspect.wrong_shards
            or not before.any()
            or any(suspect.distance(s.value, s.slice_of(due)) > limit for s in suspect.wrong_shards)
        ):
            return None
        symptom = f"multiplied by 1 − learning rate × weight decay {suspect.scope_text()}"
        return Diagnosis(DECAY, symptom, "frozen parameters decay: they are in the optimizer, and should not be")

    def suspect(self, step: int, name: str) -> SuspectTensor:
        """Return a parameter after a step."""
        found = self.comparison.steps[step - 1].updates[name].suspect
        return replace(found, telling=self._moved(step, found))

    def _own(self, step: int, name: str) -> Diagnosis | None:
        """Return a cause that is seen in the parameter alone."""
        suspect = self.suspect(step, name)
        found = incomplete(suspect) or non_finite(suspect) or self._of_rate(step, name)
        found = found or self._not_updated(step, name) or self._rounded(step, suspect)
        references = {n: one.suspect.expected for n, one in self.comparison.steps[step - 1].updates.items()}
        return found or misplaced(suspect, references)

    def _of_rate(self, step: int, name: str) -> Diagnosis | None:
        """Return a consequence if ranks took the right update at their own wrong learning rates."""
        suspect, before, sides = self.suspect(step, name), self._before(step, name), self.comparison.sides
        rates, plain = sides.evidence.series("lr", step), plain_rate(sides, step)
        if not plain or not suspect.wrong_shards:
            return None
        for s in suspect.wrong_shards:
            factor, start = rates[s.rank] / plain, s.slice_of(before)
            due = start + factor * (s.slice_of(suspect.expected) - start)
            limit = suspect.tolerance * suspect.scale * max(1.0, factor)
            if factor == 1.0 or not suspect.distance(s.value, due) <= limit:
                return None
        symptom = f"updated at other learning rates {suspect.scope_text()}"
        return Diagnosis(FaultKind.CONSEQUENCE, symptom, "follows from learning rates that differ between ranks")

    def _not_updated(self, step: int, name: str) -> Diagnosis | None:
        suspect, before = self.suspect(step, name), self._before(step, name)
        given = {shard.rank for shard in self.comparison.sides.evidence.given(step).get(name, [])}
        # A shard whose gradient is zero stays as it is if only its decay is missing.
        ranks = {rank for rank in still(suspect, before) if rank in (suspect.telling or ()) or rank not in given}
        if not ranks:
            return self._rows_not_updated(suspect, before)
        scope = scope_words(ranks, suspect.informative_ranks, suspect.counts.axes)
        evidence, when = self.comparison.sides.evidence, f"not updated in step {step}"
        if not ranks & {shard.rank for shard in evidence.gradients(step).get(name, [])}:
            return Diagnosis(FaultKind.CONSEQUENCE, f"{when} {scope}", "follows from its missing gradient")
        if all(self._is_still(number, name, ranks) for number in self.comparison.sides.steps):
            when = "never updated, still at its initial value"
        cause = "the parameter is not in the optimizer, or its gradient was cleared before the step"
        if scope != EVERYWHERE:
            cause = f"the optimizer skipped {rank_words(ranks)}'s shard"
        if not any(evidence.ranks[rank].steps[step - 1]["given"] for rank in ranks):
            cause = f"the optimizer skipped {rank_words(ranks)}'s shard: it took no step there"
        return Diagnosis(FaultKind.NOT_UPDATED, f"{when} {scope}", cause)

    @staticmethod
    def _rows_not_updated(suspect: SuspectTensor, before: Array) -> Diagnosis | None:
        """Return the cause if all that is wrong is a few rows that are still as they were."""
        if not before.ndim or not suspect.wrong_shards:
            return None
        rows = np.flatnonzero(wrong_mask(suspect).reshape(len(before), -1).any(1))
        for s in suspect.wrong_shards:
            own = [row - s.start[0] for row in rows if s.start[0] <= row < s.stop[0]]
            if not np.array_equal(s.value[own], s.slice_of(before)[own]):
                return None
        if 2 * len(rows) >= len(before):
            return None
        listed = first_words([str(row) for row in rows], 6)
        symptom = f"row{'s' if len(rows) > 1 else ''} {listed} not updated {suspect.scope_text()}"
        return Diagnosis(FaultKind.NOT_UPDATED, symptom, "the optimizer does not reach these rows of the parameter")

    def _is_still(self, step: int, name: str, ranks: set[int]) -> bool:
        before = self._before(step, name)
        shards = self.suspect(step, name).assembly.shards
        return all(np.array_equal(s.value, s.slice_of(before)) for s in shards if s.rank in ranks)

    def _before(self, step: int, name: str) -> Array:
        return to_arrays({"": self.comparison.sides.weights[step - 1][name]})[""]

    def _moved(self, step: int, suspect: SuspectTensor) -> tuple[int, ...]:
        """Return the ranks with a gradient that is not zero."""
        given = self._given(step).get(suspect.assembly.name)
        return tuple(s.rank for s in suspect.assembly.shards if given is not None and s.slice_of(given.numpy()).any())

    def _given(self, step: int) -> dict[str, Tensor]:
        if step not in self._all_given:
            self._all_given[step] = given_gradients(self.comparison.sides, step)
        return self._all_given[step]

    @cached_property
    def _all_given(self) -> dict[int, dict[str, Tensor]]:
        return {}

    def _rounded(self, step: int, suspect: SuspectTensor) -> Diagnosis | None:
        name = suspect.assembly.name
        before, unit = self._before(step, name), self.comparison.sides.unit(name)
        pairs = [(s.value, s.slice_of(suspect.expected), s.value != s.slice_of(before)) for s in suspect.wrong_shards]
        empty = np.zeros(0)
        values = torch.from_numpy(np.concatenate([value[changed] for value, _, changed in pairs] or [empty]))
        due = torch.from_numpy(np.concatenate([right[changed] for _, right, changed in pairs] or [empty]))
        for dtype in (torch.bfloat16, torch.float32):
            near = (values - due).abs() <= 2 * torch.finfo(dtype).eps * due.abs()
            fits = near & (values == values.to(dtype).double())
            is_narrower = torch.finfo(dtype).eps > unit
            if is_narrower and len(values) >= MIN_ROUNDED and int(fits.sum()) >= NEARLY_ALL * len(values):
                words, asked = (str(one).removeprefix("torch.") for one in (dtype, torch.float32))
                asked = "float64" if dtype is torch.float32 else asked
                symptom = f"all changed values are {words} numbers {suspect.scope_text()}"
                return Diagnosis(FaultKind.ROUNDED, symptom, f"weights are kept in {words} where {asked} was asked")
        return None

    @cached_property
    def _hypotheses(self) -> dict[str, Hypothesis]:
        """Return the known fault of each parameter, without a cause of its own, that has one: in turn that of most."""
        sides, names = self.comparison.sides, {name for names in self._wrong.values() for name in names}
        axes, explained, found = sides.counts.axes, dict[Hypothesis, set[str]](), dict[str, Hypothesis]()
        if not names:
            return {}
        units: dict[int, str] = {}
        for number, what in sides.units_of_steps():
            units[number] = f"{units[number]}, or {what}" if number in units else what
        shards = {axes.dp_shard * axes.cp, axes.tp, axes.dp_shard * axes.cp * axes.tp}
        for one in (*hypotheses(sides.train, shards, units), *self._of_pairs(names)):
            explained[one] = self._explained(one, names)
            if explained[one] == names:
                break
        for one in self._fitted(names - set().union(*explained.values())):
            explained[one] = self._explained(one, names)
        while explained:
            best = max(explained, key=lambda one: len(explained[one] - found.keys()))
            if not (new := explained.pop(best) - found.keys()):
                break
            found |= dict.fromkeys(new, best)
        return found

    @cached_property
    def _scopes(self) -> dict[Hypothesis, str]:
        """Say where the parameters of each fault are wrong."""
        wrong, telling = dict[Hypothesis, set[int]](), dict[Hypothesis, set[int]]()
        for step, names in self._wrong.items():
            for name in names:
                if (one := self._hypotheses.get(name)) is not None:
                    suspect = self.suspect(step, name)
                    wrong.setdefault(one, set()).update(suspect.wrong_ranks)
                    telling.setdefault(one, set()).update(suspect.informative_ranks)
        axes = self.comparison.sides.counts.axes
        return {one: scope_words(ranks, telling[one], axes) for one, ranks in wrong.items()}

    def _of_pairs(self, names: set[str]) -> Iterator[Hypothesis]:
        """Yield faults of two parameters that exchange states, and of two groups that exchange settings."""
        sides, replay = self.comparison.sides, Replay(self.comparison.sides.train, self.comparison.sides.expected.roles)
        pairs = list(combinations(sorted(names), 2)) if len(names) <= MAX_SWAPPED else []
        for a, b in pairs:
            if sides.weights[0][a].shape == sides.weights[0][b].shape:
                for states in (("first",), ("second",), ("first", "second"), ("velocity",)):
                    what = {"velocity": "momentum"}.get(states[0], " and ".join(states) + " moments")
                    cause = f"{a} and {b} exchange their {what} after each step"
                    yield Hypothesis(
                        f"updated with the other's {what}", cause, UpdateFault(swapped=(a, b), swapped_states=states)
                    )
        settings = {replay.settings(name, sides.weights[0][name]) for name in sides.expected.roles}
        for one, other in combinations(sorted(settings), 2):
            due = " and ".join(f"lr={lr:g}, weight_decay={decay:g}" for lr, decay in (one, other))
            cause = f"parameters are in the wrong group of the optimizer: {due} are exchanged"
            yield Hypothesis("updated with the settings of another group", cause, UpdateFault(exchanged=(one, other)))

    def _fitted(self, names: set[str]) -> Iterable[Hypothesis]:
        """Return faults with a learning rate or a weight decay that is any multiple of the right one."""
        sides, found = self.comparison.sides, dict[str, Hypothesis]()
        replay = Replay(sides.train, sides.expected.roles)
        for step, name in ((step, name) for step, wrong in self._wrong.items() for name in names & set(wrong)):
            before, off = self._before(step, name), proportional(self.suspect(step, name), self._before(step, name))
            if off is None or off.factor is None:
                continue
            if off.kind is FaultKind.STEP_SCALED:
                what, fault = (
                    f"updated by {number_words(off.factor)} × the reference step",
                    UpdateFault(rate=off.factor),
                )
                found.setdefault(what, Hypothesis(what, off.cause, fault, off.kind))
                continue
            peak, decay = replay.settings(name, torch.from_numpy(before))
            unit = plain_rate(sides, step) * (peak / sides.train.lr) * (decay or sides.train.weight_decay)
            if unit:
                factor = (1.0 if decay else 0.0) - off.factor / unit
                what = f"updated with {number_words(factor)} × the weight decay"
                cause = "weight decay has a wrong factor" if decay else "these parameters decay, and should not"
                fault = UpdateFault(decay="matrices" if decay else "all", decay_factor=factor)
                found.setdefault(what + cause, Hypothesis(what, cause, fault, DECAY))
        return found.values()

    def _explained(self, one: Hypothesis, names: set[str]) -> set[str]:
        """Return the parameters of which a fault explains all wrong shards in all steps."""
        sides, left = self.comparison.sides, set(names)
        train = sides.train.model_copy(update=dict(one.keys)) if one.keys else sides.train
        replay = Replay(train, sides.expected.roles, one.fault)
        for step, wrong in self._wrong.items():
            given = {name: gradient for name, gradient in self._given(step).items() if name in left}
            clip, rate, due = due_factor(sides, step, 0), plain_rate(sides, step), dict[str, Array]()
            if not all(sides.evidence.series("skipped", step)):
                due = to_arrays(replay.step(step, rate, sides.weights[step - 1], given, clip))
            left -= {n for n in left & set(wrong) if n not in due or not self._fits(step, n, due[n], one.fault)}
            if not left:
                break
        return left

    def _fits(self, step: int, name: str, due: Array, fault: UpdateFault) -> bool:
        """Return whether a hypothetical update is that of a parameter's wrong shards; if it is rounded, of nearly all
        their wrong values."""
        suspect = self.suspect(step, name)
        limit = self._limit(step, suspect, due)
        for shard in suspect.wrong_shards:
            off = np.abs(shard.value - shard.slice_of(due))
            wrong = np.abs(shard.value - shard.slice_of(suspect.expected)) > suspect.tolerance * suspect.scale
            num_off, num = int((off[wrong] > limit).sum()), int(wrong.sum())
            allowed = max(1, int((1 - NEARLY_ALL) * num)) if num >= MIN_ROUNDED else 0
            if not np.isfinite(off).all() or (num_off > allowed if fault.rounds_values else off.max() > limit):
                return False
        return bool(suspect.wrong_shards)

    def _limit(self, step: int, suspect: SuspectTensor, due: Array) -> float:
        """Return the rounding of a hypothetical update, whose division by a small number may make it large."""
        right = suspect.tolerance * suspect.scale
        larger = max_magnitude(due - self._before(step, suspect.assembly.name)) / suspect.scale
        return float(4 * right * max(1.0, larger) ** 1.5)


def proportional(suspect: SuspectTensor, before: Array) -> Diagnosis | None:
    """Diagnose an error of a parameter that is proportional to the expected step, or to its values before it."""
    wrong = suspect.wrong_shards
    value = np.concatenate([shard.value.reshape(-1) for shard in wrong])
    due, start = (np.concatenate([s.slice_of(x).reshape(-1) for s in wrong]) for x in (suspect.expected, before))
    num_distinct = sum({(s.start, s.stop): s.value.size for s in suspect.wrong_shards}.values())
    if not is_significant(num_distinct - 1, 1.0, FIT):
        return None
    factor = _coefficient(value - start, due - start, value - due)
    if factor is not None:
        cause = "a different learning rate or number of steps"
        if factor < 0:
            cause = "the update goes in the opposite direction"
        elif abs(factor - round(factor)) < FIT:
            cause = f"the step was taken {round(factor)} times, or with {round(factor)} times the learning rate"
        symptom = f"updated by {number_words(factor)} × the reference step {suspect.scope_text()}"
        return Diagnosis(FaultKind.STEP_SCALED, symptom, cause, factor=factor)
    rate = _coefficient(value - due, start, value - due)
    if rate is None:
        return None
    symptom = f"off by {'+' if rate > 0 else '−'}{abs(rate):.2g} × the weights {suspect.scope_text()}"
    cause = f"weight decay is too {'small' if rate > 0 else 'large'}"
    return Diagnosis(DECAY, symptom, cause, factor=rate)


def still(suspect: SuspectTensor, before: Array) -> set[int]:
    """Return the ranks with a wrong shard that has not changed."""
    return {s.rank for s in suspect.wrong_shards if np.array_equal(s.value, s.slice_of(before))}


def _coefficient(value: Array, basis: Array, off: Array) -> float | None:
    """Return c such that value ≈ c · basis, or None if the residual is too large relative to the error `off`."""
    energy = float(basis @ basis)
    if energy == 0.0:
        return None
    factor = float(value @ basis) / energy
    residual = float(np.linalg.norm(value - factor * basis))
    return factor if residual <= FIT * float(np.linalg.norm(off)) else None
