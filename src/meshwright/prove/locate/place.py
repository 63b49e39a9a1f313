"""Name the place where a forward goes wrong, and what is wrong there."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.prove.compare.result import Diagnosis, FaultKind
from meshwright.prove.diagnose.phrases import index_words, scope_words
from meshwright.prove.locate.first_difference import TOKENS, FirstDifference, Forward
from meshwright.prove.locate.narrow_operators import narrow_words
from meshwright.prove.locate.relations import explain, parts_of
from meshwright.prove.stage_placement import StagePlacement
from meshwright.units import join_words


@dataclass(frozen=True)
class Step:
    """The step in which the forward goes wrong."""

    number: int
    samples: tuple[tuple[int, ...], ...]
    """Samples of each cell."""
    stages: StagePlacement | None = None


def locate(forward: Forward, step: Step) -> Diagnosis | None:
    """Return the place and the kind of the first difference; None if there is none."""
    first = forward.first_difference()
    when = f"in step {step.number}"
    if first is None:
        return None
    scope = scope_words({value.rank for value in first.wrong}, {value.rank for value in first.compared}, forward.axes)
    symptom = f"the first value that differs is the {first.name}, {scope}"
    relation = _order(first, forward) or narrow_words(first, forward)
    relation = relation or explain(first.wrong, forward) or _unreduced(first)
    between = _between(first, step)
    cause = f"{relation}; {between}" if relation else between
    where = _where(first, step)
    error = max(value.error for value in first.wrong)
    detail = f"{when}: relative error {error:.1e}" + (f", {where}" if where else "")
    return Diagnosis(FaultKind.FORWARD, symptom, cause, detail)


def _order(first: FirstDifference, forward: Forward) -> str | None:
    """Name a module that a rank ran too early."""
    value = first.wrong[0]
    due = list(forward.reference[value.cell])
    later = set(due[due.index(first.name) + 1 :])
    ran = list(forward.ranks[value.rank][value.cell % forward.num_microbatches])
    early = next((name for name in ran[: ran.index(first.name)] if name in later), None)
    return None if early is None else f"{_module(early)} runs before {_module(first.name)}"


def _module(name: str) -> str:
    return name.partition(" of ")[2]


def _unreduced(first: FirstDifference) -> str | None:
    """Name the partial sum that was not reduced before this value was computed from it."""
    partial = first.partial_before
    return f"the sum over tp is missing: the {partial} is right only once it is summed" if partial else None


def _between(first: FirstDifference, step: Step) -> str:
    """Say which code computes the value, from what was compared before it."""
    what, module = first.name.partition(" ")[0], _module(first.name)
    if what == "output":
        if f"input of {module}" in first.right_before or f"queries of {module}" in first.right_before:
            return f"what {module} takes is right, so the fault is in it"
        return f"{module}, or what it takes"
    if what in ("queries", "keys", "values"):
        return f"the projection is right: look at what is done to {what} before attention"
    sender = _sending_stage(module, step.stages)
    if sender is not None:
        return f"what {_stage(sender + 1, step)} receives is not what {_stage(sender, step)} returns"
    if not first.right_before:
        return f"what {module} is given"
    last = first.right_before[-1]
    return f"the {last} is right: look at what is computed between them"


def _sending_stage(module: str, stages: StagePlacement | None) -> int | None:
    """Return the stage that sends a module its input; None if the module is not the first of a later stage."""
    if stages is None:
        return None
    for stage, layers in enumerate(stages.layers):
        if stage and layers and module.rpartition(".")[2] == str(layers[0]) and module.count(".") == 1:
            return stage - 1
    return None


def _stage(number: int, step: Step) -> str:
    assert step.stages is not None, "only a pipeline has stages"
    return step.stages.describe([number])


def _where(first: FirstDifference, step: Step) -> str:
    """Describe the samples, tokens, heads and features that differ, as far as others don't."""
    found = []
    cells = sorted({value.cell for value in first.wrong})
    if len(cells) < len({value.cell for value in first.compared}):
        samples = [sample for cell in cells for sample in step.samples[cell]]
        found.append(f"in the micro-batch{'es' if len(cells) > 1 else ''} of samples {index_words(samples)}")
    for dim, places, size in parts_of(first.wrong):
        if 0 < len(places) < size:
            found.append(f"{_dim_words(first, dim)} {index_words(places.tolist())} of {size}")
    return join_words(found) if found else ""


def _dim_words(first: FirstDifference, dim: int) -> str:
    num_dims = first.wrong[0].observed.ndim
    if dim == 0:
        return "at rows"
    if dim == TOKENS and num_dims > 2:
        return "at positions"
    return "in heads" if dim == 2 and num_dims == 4 else "in features"
