"""From verdicts to findings: each wrong value gets a cause, in the order in which faults arise.

The earliest step comes first, then the earliest place in a step: samples, weights, forward, loss, gradients, norm,
clipping, learning rate, update. A value that is wrong in several steps is told once, in the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from meshwright.prove.explain.contributions import scale_diagnosis
from meshwright.prove.explain.experts import explain_buffer, narrow_to_experts
from meshwright.prove.explain.gradient_norm import diagnose_norm, suspect_norm
from meshwright.prove.explain.gradients import (
    GradientContext,
    diagnose_gradient,
    name_accumulated_sums,
    unrecognised,
    wrong_initial,
)
from meshwright.prove.explain.samples import OtherContents, diagnose_contents, diagnose_samples, wrong_steps
from meshwright.prove.explain.scalars import diagnose_given, diagnose_loss, diagnose_rates
from meshwright.prove.explain.shared_parameters import StageContributions, locate_stages
from meshwright.prove.explain.updates import UpdateCauses
from meshwright.prove.judge.judge import Comparison, StepComparison, given_gradients
from meshwright.prove.judge.tensors import Array, LayoutCounts, close, max_magnitude, to_arrays
from meshwright.prove.judge.verdicts import NOISY_PROGRESS, PROGRESS, Verdicts, any_wrong, compare_step, wrong_names
from meshwright.prove.record.evidence import INITIAL, Contents, RecordedShard
from meshwright.prove.record.reference_run import TensorsByName
from meshwright.prove.result import (
    UNKNOWN,
    Diagnosis,
    FaultKind,
    Finding,
    StepValue,
    TensorResult,
    number_words,
    rank_words,
    scope_words,
)
from meshwright.units import first_words

SUM_TOLERANCE = 1e-11
"""Largest relative error of a sum of contributions; those of a weight that is not used token by token are far off."""
TokenParts = Callable[[int, Mapping[str, Tensor]], tuple[TensorsByName, Tensor]]
"""Compute the contributions of context-parallel ranks to a step at given weights: gradients, and losses."""
ChunkParts = Callable[[int, Mapping[str, Tensor]], TensorsByName]
"""Compute the contributions of the chunks of the head's loss to gradients of a step at given weights."""
LATE = (
    (1, "forward and backward use weights that are one step late: they are gathered before the update"),
    (1_000_000, "forward and backward never see the updates: gathered weights are kept and not gathered again"),
)
"""Steps by which the weights are late, and the cause."""
MAX_NAMES = 3
ORDER = ("evidence", "samples", "initial", "state", "dropout", "forward", "loss", "gradient", "norm", "clipping",
         "learning rate", "update", "error feedback", "other steps")  # fmt: skip
"""Kinds of values in the order in which faults arise in a step."""


@dataclass(frozen=True, eq=False)
class Explained:
    """Findings, and the verdicts with causes that they were made from."""

    findings: tuple[Finding, ...]
    losses: tuple[StepValue, ...]
    norms: tuple[StepValue, ...]
    tensors: dict[str, dict[str, TensorResult]]
    """[kind][name]: the first wrong tensor of all steps, or the one with the largest error."""


@dataclass(eq=False)
class Explainer:
    """Explains a comparison."""

    comparison: Comparison
    contents: Contents = field(default_factory=dict)
    """Digests of the samples of all steps; empty if they are not known."""
    tokens: TokenParts | None = None
    """Contributions of context-parallel ranks, if there are any."""
    others: OtherContents = lambda samples: iter(())
    """Digests of samples that are read otherwise."""
    chunks: ChunkParts | None = None
    """Contributions of the chunks of the head's loss, if it is computed by chunks."""
    num_chunks: int = 0
    """Number of chunks of a micro-batch."""
    is_compiled: bool = False
    """Whether blocks are compiled."""

    def explain(self) -> Explained:
        """Return the findings, earliest first, causes before what follows from them."""
        one = self.comparison
        initial = {name: self._initial(name) for name in one.initial}
        gradients = [self._gradients(step) for step in one.steps]
        gradients = [self._as_a_whole(number, gradients) for number in range(len(gradients))]
        gradients = [self._after_multiples(verdicts) for verdicts in gradients]
        updates = [self._updates(step) for step in one.steps]
        losses = tuple(self._loss(step, gradients[at]) for at, step in enumerate(one.steps))
        gradients = [after_loss(found, loss) for found, loss in zip(gradients, losses, strict=True)]
        norms = tuple(self._norm(step) for step in one.steps)
        findings = [Finding("samples", found, step=step) for step, found in self._samples()]
        findings += group_by_cause("initial", [initial])
        findings += self._forward
        findings += _series("loss", losses)
        findings += group_by_cause("gradient", [_results(v) for v in gradients])
        findings += _series("norm", norms)
        findings += self._given()
        findings += [Finding("learning rate", found, step=step) for step, found in diagnose_rates(self.comparison)]
        findings += group_by_cause("update", [_results(v) for v in updates])
        tensors = {
            "initial": initial,
            "gradient": shown([_results(v) for v in gradients]),
            "update": shown([_results(v) for v in updates]),
        }
        return Explained(ordered(findings), losses, norms, tensors)

    @cached_property
    def _forward(self) -> list[Finding]:
        """Return findings on the forward as a whole, which causes of losses and gradients add."""
        return []

    def _samples(self) -> Iterator[tuple[int, Diagnosis]]:
        evidence, sides = self.comparison.sides.evidence, self.comparison.sides
        batches = [sides.expected.batch(step) for step in sides.steps]
        read = [[found["samples"] for found in record.steps] for record in evidence.ranks]
        yield from diagnose_samples(read, batches, evidence.axes, evidence.num_microbatches)
        contents = [[found["contents"] for found in record.steps] for record in evidence.ranks]
        yield from diagnose_contents(contents, self.contents, batches, evidence.axes, self.others)

    @cached_property
    def _wrong_samples(self) -> set[int]:
        """Return the steps in which a rank read the wrong samples."""
        evidence, sides = self.comparison.sides.evidence, self.comparison.sides
        batches = [sides.expected.batch(step) for step in sides.steps]
        return wrong_steps(evidence, batches, self.contents)

    @cached_property
    def _torn(self) -> int | None:
        """Return the first step after which replicas differ, 0 for initial weights; what is due later isn't known."""
        for step, verdicts in enumerate([self.comparison.initial, *(one.updates for one in self.comparison.steps)]):
            if any(verdict.suspect.large_mismatches for verdict in verdicts.values()):
                return step
        return None

    def _follows(self, step: int) -> str:
        """Return what of a step or before it makes values of the forward and backward wrong, or an empty string."""
        if step in self._wrong_samples:
            return "wrong samples"
        unequal = {copies.what for copies in self.comparison.sides.evidence.unequal()}
        if INITIAL in unequal or (unequal and step > 1):
            return "copies of a shared parameter that differ"
        return "replicas of weights that differ" if self._torn is not None and step > self._torn else ""

    def _initial(self, name: str) -> TensorResult:
        verdict = self.comparison.initial[name]
        if verdict.result.ok:
            return verdict.result
        references = {other: one.suspect.expected for other, one in self.comparison.initial.items()}
        return replace(verdict.result, diagnosis=wrong_initial(verdict.suspect, references))

    def _gradients(self, one: StepComparison) -> Verdicts:
        sides, verdicts = self.comparison.sides, dict(one.gradients)
        if not any_wrong(verdicts):
            return verdicts
        references = {name: verdict.suspect.expected for name, verdict in verdicts.items()}
        last = one.step - 2
        before = (given_gradients(sides, one.step - 1), sides.references[last].gradients) if one.step > 1 else ()
        context = GradientContext(
            references,
            shared=self._shared(one.step),
            tokens=lambda name: self._token_parts(one.step, name),
            chunks=lambda name: self._chunk_parts(one.step).get(name),
            num_chunks=self.num_chunks,
            before=tuple(map(to_arrays, before)),
            follows=self._follows(one.step),
            units=lambda: self._units[one.step],
            divisors=lambda: self._divisors(one.step),
        )
        for name in wrong_names(verdicts):
            verdict = verdicts[name]
            absent = self._missing_gradient(one.step, name)
            found = absent or diagnose_gradient(verdict.suspect, context)
            if self.is_compiled and found.kind is FaultKind.ZERO:
                lost = "a compiled block may have lost it (train.compile)"
                found = replace(found, cause=f"{found.cause}; {lost}")
            verdicts[name] = verdict.with_diagnosis(found)
        verdicts = name_accumulated_sums(narrow_to_axis(verdicts, sides.counts), sides.counts)
        located = locate_stages(narrow_to_experts(verdicts, sides.evidence.experts), sides.evidence.stages)
        return as_one(located, sides.counts)

    def _divisors(self, step: int) -> tuple[int, dict[str, int]]:
        """Return the number of loss units of a step, and others that a loss may be divided by instead, by words.

        Those are left out that would be right in another wrong step, or wrong in one that is right.
        """
        wrong = {one.step for one in self.comparison.steps if any_wrong(one.gradients)}
        due = {one: int(units.sum()) for one, units in self._units.items()}
        numbers = {one: self._possible_divisors(one) for one in due}
        fitting = [what for what in numbers[step] if all((numbers[k][what] != due[k]) == (k in wrong) for k in due)]
        return due[step], {what: numbers[step][what] for what in fitting if numbers[step][what] > 0}

    @cached_property
    def _units(self) -> dict[int, Array]:
        """Count the loss units of each step: [data-parallel rank, micro-batch]."""
        sides = self.comparison.sides
        return {step: to_arrays({"": sides.expected.units(step)})[""].astype(int) for step in sides.steps}

    def _possible_divisors(self, step: int) -> dict[str, int]:
        sides, units = self.comparison.sides, self._units[step]
        whole, due = sides.train.global_batch * sides.train.seq_len, int(units.sum())
        found = {"all tokens of the batch: padding or targets that are ignored are counted": whole}
        found |= {f"the targets of step {other}": int(number.sum()) for other, number in self._units.items()}
        found |= {f"the targets of data-parallel rank {at}": int(row.sum()) for at, row in enumerate(units)}
        for number, per in (
            (1, "one"),
            (sides.counts.axes.num_ranks(), "one for each rank"),
            (units.size, "one for each micro-batch"),
            (sides.counts.num_samples, "one for each sample"),
        ):
            found |= {f"{per} too many": due + number, f"{per} too few": due - number}
        return found

    def _missing_gradient(self, step: int, name: str) -> Diagnosis | None:
        evidence = self.comparison.sides.evidence
        gradient, parameter = evidence.gradients(step).get(name, []), evidence.weights(step - 1).get(name, [])
        return missing_gradient(gradient, parameter, self.comparison.sides.counts)

    def _shared(self, step: int) -> StageContributions | None:
        sides = self.comparison.sides
        stages = sides.evidence.stages
        if stages is None:
            return None
        find: Callable[[], dict[str, Array]] = lambda: to_arrays(  # noqa: E731
            sides.expected.by_stage(step, sides.weights[step - 1], stages)
        )
        return StageContributions(stages, find)

    def _token_parts(self, step: int, name: str) -> Array | None:
        """Return contributions of context-parallel ranks to a gradient, if they sum to it."""
        if self.tokens is None:
            return None
        parts = self._all_token_parts(step)[0].get(name)
        due = self.comparison.steps[step - 1].gradients[name].suspect.expected
        return parts if parts is not None and _sums_to(parts, due) else None

    def _all_token_parts(self, step: int) -> tuple[dict[str, Array], Array]:
        assert self.tokens is not None, "only layouts with cp have such contributions"
        if step not in self._computed_tokens:
            gradients, losses = self.tokens(step, self.comparison.sides.weights[step - 1])
            self._computed_tokens[step] = to_arrays(gradients), to_arrays({"": losses})[""]
        return self._computed_tokens[step]

    def _chunk_parts(self, step: int) -> dict[str, Array]:
        if step not in self._computed_chunks:
            found = {} if self.chunks is None else self.chunks(step, self.comparison.sides.weights[step - 1])
            self._computed_chunks[step] = to_arrays(found)
        return self._computed_chunks[step]

    @cached_property
    def _computed_chunks(self) -> dict[int, dict[str, Array]]:
        return {}

    @cached_property
    def _computed_tokens(self) -> dict[int, tuple[dict[str, Array], Array]]:
        return {}

    def _as_a_whole(self, at: int, gradients: list[Verdicts]) -> Verdicts:
        """Explain unknown gradients by a step that is right but for its weights, or for how its batch is split."""
        if not any(_is_unknown(verdict.result) for verdict in gradients[at].values()):
            return gradients[at]
        one = self.comparison.steps[at]
        if (
            self._late_cause is None
            and not self._uses_multiples(one, gradients[:at])
            and not self._depends_on_split(one)
        ):
            return gradients[at]
        follows = Diagnosis(FaultKind.CONSEQUENCE, "wrong gradient", "follows from the step as a whole")
        return {
            name: verdict.with_diagnosis(follows) if _is_unknown(verdict.result) else verdict
            for name, verdict in gradients[at].items()
        }

    @cached_property
    def _late_cause(self) -> str | None:
        """Return the cause if all wrong steps are those of the reference at earlier weights."""
        wrong = [one for one in self.comparison.steps if any_wrong(one.gradients)]
        if not wrong or wrong[0].step == 1:
            return None
        for late, cause in LATE:
            if all(self._is_at(one, max(0, one.step - 1 - late)) for one in wrong):
                what = "the weights of the step before" if late == 1 else "the initial weights in every step"
                symptom = f"losses and gradients equal the reference with {what}, from step {wrong[0].step} on"
                found = Diagnosis(FaultKind.OTHER_STEP, symptom, cause)
                self._forward.append(Finding("forward", found, step=wrong[0].step))
                return cause
        return None

    def _uses_multiples(self, one: StepComparison, earlier: list[Verdicts]) -> bool:
        """Return whether a step is that of parameters multiplied like their gradients in earlier steps."""
        found = {name: verdict.result.diagnosis for verdicts in earlier for name, verdict in verdicts.items()}
        times = {name: one.factor for name, one in found.items() if one is not None and one.factor is not None}
        if not times:
            return False
        weights = {
            name: value * times.get(name, 1.0) for name, value in self.comparison.sides.weights[one.step - 1].items()
        }
        due = self.comparison.sides.expected.step(one.step, weights)
        if not self._equals(
            one, due.loss, {name: value * times.get(name, 1.0) for name, value in due.gradients.items()}
        ):
            return False
        if not self._forward:
            which = " and ".join(sorted({number_words(factor) for factor in times.values()}))
            names = first_words([*times], MAX_NAMES)
            symptom = f"step {one.step} and its gradients equal the reference with {which} × {names}"
            cause = (
                "the forward uses the parameter so many times, such as a bias that each rank of tp adds before the sum"
            )
            first = min(
                one.step for one, wrong in zip(self.comparison.steps, earlier, strict=False) if any_wrong(wrong)
            )
            self._forward.append(Finding("forward", Diagnosis(FaultKind.FORWARD, symptom, cause), step=first))
        self._multiples.update(times)
        return True

    @cached_property
    def _multiples(self) -> dict[str, float]:
        """Return the factors of the parameters that the forward uses more than once."""
        return {}

    def _after_multiples(self, verdicts: Verdicts) -> Verdicts:
        """Let the gradients of these parameters follow from it."""
        follows = Diagnosis(FaultKind.CONSEQUENCE, "wrong gradient", "follows from how often the forward uses it")
        return {
            name: verdict.with_diagnosis(follows) if name in self._multiples and not verdict.result.ok else verdict
            for name, verdict in verdicts.items()
        }

    def _depends_on_split(self, one: StepComparison) -> bool:
        """Return whether a step is that of the plain model on the layout's micro-batches, not on the whole batch."""
        if any(verdict.suspect.noisy for verdict in one.gradients.values()):
            return False
        parts = self.comparison.sides.contributions(one.step)
        whole = {name: value.sum((0, 1)) for name, value in parts.gradients.items()}
        if not self._equals(one, float(parts.losses.sum()), whole):
            return False
        if not self._forward:
            symptom = f"step {one.step} equals the plain model on the layout's micro-batches, not on the batch as one"
            cause = (
                "the model computes something else if the batch is split: by the place of a sample in its micro-batch "
                "instead of the sample, as random numbers of dropout, or by statistics of a micro-batch"
            )
            self._forward.append(Finding("forward", Diagnosis(FaultKind.FORWARD, symptom, cause), step=one.step))
        return True

    def _is_at(self, one: StepComparison, version: int) -> bool:
        """Return whether all losses and gradients of a step are those at the weights after another step."""
        sides = self.comparison.sides
        found = sides.expected.step(one.step, sides.weights[version])
        return self._equals(one, found.loss, found.gradients)

    @staticmethod
    def _equals(one: StepComparison, loss: float, gradients: TensorsByName) -> bool:
        if not compare_step(one.step, list(one.loss.observed), loss, one.loss.tolerance).ok:
            return False
        due = to_arrays(gradients)
        for name, verdict in one.gradients.items():
            suspect, before = replace(verdict.suspect, expected=due[name]), verdict.result
            limit = (1 if suspect.noisy else 10) * suspect.tolerance
            if not before.ok:
                limit = min(limit, (NOISY_PROGRESS if suspect.noisy else PROGRESS) * before.error.relative)
            if not suspect.error().relative <= limit:
                return False
        return True

    def _loss(self, one: StepComparison, gradients: Verdicts) -> StepValue:
        if one.loss.ok:
            return one.loss
        sides, step = self.comparison.sides, one.loss
        whole = any(found.step <= one.step for found in self._forward)
        follows = self._follows(one.step) or ("the step as a whole" if whole else "")
        counts = replace(sides.counts, rounding=max(sides.counts.rounding, step.tolerance))
        parts = to_arrays({"": sides.contributions(one.step).losses})[""] if not follows else None
        found = diagnose_loss(step, parts, counts, root_fault=follows)
        kinds = {v.result.diagnosis.kind for v in gradients.values() if v.result.diagnosis is not None}
        if found.kind in UNKNOWN and kinds and not kinds & set(UNKNOWN):
            cause = "follows from what is wrong with the gradients"
            return replace(step, diagnosis=Diagnosis(FaultKind.CONSEQUENCE, found.symptom, cause, found.detail))
        if found.kind in UNKNOWN and self.tokens is not None:
            parts = self._all_token_parts(one.step)[1]
            if _sums_to(parts, np.array(step.expected)):
                by_tokens = diagnose_loss(step, parts, replace(counts, by_context=True), root_fault="")
                found = found if by_tokens.kind in UNKNOWN else by_tokens
        return replace(step, diagnosis=found)

    def _norm(self, one: StepComparison) -> StepValue:
        if one.norm.ok:
            return one.norm
        if any(verdict.suspect.large_mismatches for verdict in one.gradients.values()):
            follows = "follows from replicas of gradients that differ"
            return replace(one.norm, diagnosis=Diagnosis(FaultKind.CONSEQUENCE, "wrong", follows))
        sides = self.comparison.sides
        assemblies = {name: verdict.suspect.assembly for name, verdict in one.gradients.items()}
        counts = replace(sides.counts, rounding=max(sides.counts.rounding, one.norm.tolerance))
        earlier = tuple(other.norm.expected for other in self.comparison.steps[: one.step - 1])
        suspect = suspect_norm(one.norm, assemblies, counts, sides.evidence.stages, sides.evidence.experts, earlier)
        return replace(one.norm, diagnosis=diagnose_norm(suspect))

    def _given(self) -> list[Finding]:
        one = next((one for one in self.comparison.steps if one.given), None)
        if one is None:
            return []
        found = diagnose_given(self.comparison.sides, one)
        return [Finding("clipping", found, step=one.step)]

    def _updates(self, one: StepComparison) -> Verdicts:
        verdicts, sides = dict(one.updates), self.comparison.sides
        for name in wrong_names(verdicts):
            verdict = verdicts[name]
            if why := self._update_follows(one, name):
                symptom = f"wrong {verdict.suspect.scope_text()}"
                found = Diagnosis(FaultKind.CONSEQUENCE, symptom, f"follows from {why}")
            elif name in sides.expected.roles:
                found = self._update_causes.of(one.step, name)
            else:
                found = self._update_causes.of_frozen(one.step, name) or explain_buffer(self.comparison, one.step, name)
            verdicts[name] = verdict.with_diagnosis(found)
        return verdicts

    def _update_follows(self, one: StepComparison, name: str) -> str:
        """Return why ranks update replicas by other gradients or from other weights, or an empty string."""
        gradient = one.gradients.get(name)
        if gradient is not None and gradient.suspect.large_mismatches:
            return "replicas of its gradient that differ"
        return "replicas of weights that differ" if self._torn is not None and one.step > self._torn else ""

    @cached_property
    def _update_causes(self) -> UpdateCauses:
        return UpdateCauses(self.comparison)


def _sums_to(parts: Array, expected: Array) -> bool:
    return max_magnitude(parts.sum((0, 1)) - expected) <= SUM_TOLERANCE * max_magnitude(parts)


def _is_unknown(result: TensorResult) -> bool:
    return result.diagnosis is not None and result.diagnosis.kind in UNKNOWN


def _results(verdicts: Verdicts) -> dict[str, TensorResult]:
    return {name: verdict.result for name, verdict in verdicts.items()}


def shown(steps: list[dict[str, TensorResult]]) -> dict[str, TensorResult]:
    """Return of each tensor the first wrong one, or the one with the largest error for its tolerance."""
    found: dict[str, TensorResult] = {}
    for results in steps:
        for name, result in results.items():
            old = found.get(name)
            if old is None or (old.ok and (not result.ok or _size(result) > _size(old))):
                found[name] = result
    return found


def _size(result: TensorResult) -> float:
    return result.error.relative / result.tolerance if result.tolerance else result.error.relative


def _series(about: str, steps: tuple[StepValue, ...]) -> Iterator[Finding]:
    first = next((one for one in steps if one.diagnosis is not None), None)
    if first is not None and first.diagnosis is not None:
        yield Finding(about, first.diagnosis, step=first.step)


def group_by_cause(about: str, steps: list[dict[str, TensorResult]]) -> list[Finding]:
    """Group wrong tensors of one kind by diagnosis, each told in the first step in which it is wrong."""
    members: dict[tuple[int, FaultKind, str, str], list[tuple[str, TensorResult]]] = {}
    for name, result in shown(steps).items():
        if (found := result.diagnosis) is not None:
            # A fault of the optimizer may be seen later in some parameters.
            step = 0 if about == "update" and found.kind not in UNKNOWN else result.step
            members.setdefault((step, found.kind, found.symptom, found.cause), []).append((name, result))
    num_all, findings = max((len(results) for results in steps), default=0), []
    for group in members.values():
        # Show the detail of the member with the largest error.
        group.sort(key=lambda pair: -pair[1].error.relative)
        diagnosis = group[0][1].diagnosis
        assert diagnosis is not None, "only tensors with a diagnosis are grouped"
        names = tuple(name for name, _ in group)
        findings.append(Finding(about, diagnosis, names, num_all, min(result.step for _, result in group)))
    return sorted(findings, key=lambda one: -len(one.members))


def ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return findings by step and place, those with a cause before others of the same place, consequences last."""
    return tuple(
        sorted(
            findings,
            key=lambda one: (
                one.is_consequence,
                max(one.step, 1),
                ORDER.index(one.about),
                one.diagnosis.kind in UNKNOWN,
            ),
        )
    )


def after_loss(verdicts: Verdicts, loss: StepValue) -> Verdicts:
    """Return gradients that follow from a loss, if all whose cause is known are wrong in the same way."""
    found = loss.diagnosis
    known = {name: v.result.diagnosis for name, v in verdicts.items() if v.result.diagnosis is not None}
    known = {name: one for name, one in known.items() if one.kind not in (*UNKNOWN, FaultKind.CONSEQUENCE)}
    causes = {(one.symptom, one.cause) for one in known.values()}
    if found is None or found.kind in UNKNOWN or causes != {(found.symptom, found.cause)}:
        return verdicts
    follows = Diagnosis(FaultKind.CONSEQUENCE, found.symptom, "follows from the loss")
    return {name: verdict.with_diagnosis(follows) if name in known else verdict for name, verdict in verdicts.items()}


def as_one(verdicts: Verdicts, counts: LayoutCounts) -> Verdicts:
    """Return rounded gradients with one cause for all that aren't recognised: which ranks' are wrong is chance."""
    unknown = {
        name: verdict.suspect
        for name, verdict in verdicts.items()
        if verdict.suspect.noisy
        and verdict.result.diagnosis is not None
        and verdict.result.diagnosis.kind is FaultKind.UNRECOGNISED
    }
    wrong = sorted({rank for one in unknown.values() for rank in one.wrong_ranks})
    informative = sorted({rank for one in unknown.values() for rank in one.informative_ranks})
    result = dict(verdicts)
    for name, suspect in unknown.items():
        found = replace(unrecognised(suspect), cause=f"wrong {scope_words(wrong, informative, counts.axes)}")
        result[name] = verdicts[name].with_diagnosis(found)
    return result


def missing_gradient(
    gradient: list[RecordedShard], parameter: list[RecordedShard], counts: LayoutCounts
) -> Diagnosis | None:
    """Diagnose ranks that hold a parameter shard but no gradient at all for it."""
    holders = {shard.rank for shard in parameter if shard.value.numel()}
    lacking = holders - {shard.rank for shard in gradient}
    if not lacking:
        return None
    scope = scope_words(lacking, holders, counts.axes)
    whose = "this parameter" if lacking == holders else f"{rank_words(lacking)}'s shard of it"
    return Diagnosis(FaultKind.ZERO, f"no gradient {scope}", f"no gradient reached {whose}")


def narrow_to_axis(verdicts: Verdicts, counts: LayoutCounts) -> Verdicts:
    """Attribute a wrong factor to the axis along which exactly the affected parameters are replicated."""
    members: dict[float, set[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.result.diagnosis is not None and verdict.result.diagnosis.factor is not None:
            members.setdefault(verdict.result.diagnosis.factor, set()).add(name)
    narrowed = dict(verdicts)
    for factor, names in members.items():
        fitting = [
            axis
            for axis, size in counts.axes.used().items()
            if (close(factor, size, counts.rounding) or close(factor, 1 / size, counts.rounding))
            and names == {name for name, verdict in verdicts.items() if axis in verdict.result.replicated}
        ]
        if len(fitting) == 1 and len(names) < len(verdicts):
            for name in names:
                blamed = scale_diagnosis(factor, verdicts[name].suspect.scope_text(), counts, only_axis=fitting[0])
                scope = f"{blamed.cause}, on exactly the parameters replicated over {fitting[0]}"
                narrowed[name] = verdicts[name].with_diagnosis(replace(blamed, cause=scope))
    return narrowed
