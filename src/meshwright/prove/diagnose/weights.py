"""Why a parameter is wrong before the first step, after it, or after the last one.

After a step the first thing to know is whether it could have been right: a wrong gradient, norm or sample anywhere
reaches every parameter through clipping and the next forward pass. What can still be told apart is named: not
updated, updated by a multiple of the step, weight decay missing or where none is due. After the first step all that is
exact; later a wrong update has fed back into itself and everything else, and the words say `about`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.prove.compare.result import Diagnosis, Kind
from meshwright.prove.compare.tensor_shards import Array, Assembly, Piece
from meshwright.prove.diagnose.fit_contributions import believable
from meshwright.prove.diagnose.gradients import Surroundings, follows
from meshwright.prove.diagnose.phrases import EVERYWHERE, number_words, place_words, rank_words
from meshwright.prove.diagnose.suspect import Subject, copies_differ, moved, non_finite, unrecognised, unsound

EXACT = 1e-6
"""What a fit may leave over to be called exact: one step, nothing fed back."""
ROUGH = 0.05
"""… and to be called `about`: several steps, in which a wrong update feeds back."""


@dataclass(frozen=True, eq=False)
class History:
    """What is known of the steps that led to a parameter."""

    initial: Array | None
    """The reference's value before the first step."""
    last: Assembly | None = None
    """The layout's value after the last step, when the one in question is an earlier one."""
    own_wrong: str = ""
    """What of this parameter was wrong before, in words: its gradient, its update in step 1."""
    others_wrong: str = ""
    """What was wrong elsewhere."""
    skipped: bool = False
    """Step 1 had no finite norm: a step that must be skipped."""
    known_right: str = "the gradients and the norm of step 1 are right"
    """What rules out other causes than the optimizer."""


def diagnose_initial(subject: Subject, around: Surroundings) -> Diagnosis:
    """The likely cause of wrong initial weights."""
    found = unsound(subject) or non_finite(subject) or moved(subject, around.others)
    if found is not None:
        return found
    right = [rank for rank in subject.speaking if rank not in subject.wrong_ranks]
    seen = f"initial weights differ {'on ' + rank_words(subject.wrong_ranks) if right else EVERYWHERE}"
    cause = "ranks start from other weights than the reference (seed, order of initialisation, missing broadcast)"
    base = copies_differ(subject) or unrecognised(subject)
    detail = f"{base.seen}; {base.detail}" if base.kind is Kind.COPIES_DIFFER else base.detail
    return Diagnosis(base.kind, seen, cause, detail)


def diagnose_update(subject: Subject, around: Surroundings, history: History) -> Diagnosis:
    """The likely cause of a parameter that is wrong after a step."""
    found = unsound(subject) or non_finite(subject)
    if found is not None:
        return found
    if not history.own_wrong:
        found = _not_updated(subject, history) or moved(subject, around.others)
        if found is not None and history.skipped and found.kind is Kind.NOT_UPDATED:
            return Diagnosis(
                Kind.CONSEQUENCE, found.seen, "follows from a norm that is not finite: the step is skipped"
            )
        if found is not None:
            return found
    if history.own_wrong or history.others_wrong:
        cause = f"follows from {history.own_wrong or history.others_wrong}"
        return follows(subject, around) or Diagnosis(Kind.CONSEQUENCE, f"wrong {subject.place()}", cause)
    return _step(subject, history) or copies_differ(subject) or _optimizer(subject, history)


def _optimizer(subject: Subject, history: History) -> Diagnosis:
    base = unrecognised(subject)
    cause = f"{base.cause}; {history.known_right}: look at the optimizer's step, at clipping and at later gradients"
    return Diagnosis(base.kind, base.seen, cause, base.detail)


def _not_updated(subject: Subject, history: History) -> Diagnosis | None:
    start = history.initial
    if start is None:
        return None
    still = {piece.rank: np.array_equal(piece.value, piece.of(start)) for piece in subject.wrong}
    ranks = {rank for rank, same in still.items() if same}
    if not ranks:
        return None
    place = place_words(ranks, subject.speaking, subject.counts.axes)
    when = "never updated"
    if history.last is not None and any(
        piece.rank in ranks and not np.array_equal(piece.value, piece.of(start)) for piece in history.last.pieces
    ):
        when = "not updated in step 1"
    cause = "the optimizer does not know this parameter, or its gradient was taken away before the step"
    if place != EVERYWHERE:
        cause = f"the optimizer skipped {rank_words(ranks)}'s piece"
    rest = sorted(set(subject.wrong_ranks) - ranks)
    detail = f"{rank_words(rest)} differ{'s' if len(rest) == 1 else ''} too, which may follow from it" if rest else ""
    return Diagnosis(Kind.NOT_UPDATED, f"{when}, still the initial weights {place}", cause, detail)


def _step(subject: Subject, history: History) -> Diagnosis | None:
    """The difference in terms of the step that was due and of the weights themselves."""
    if history.initial is None:
        return None
    start = history.initial

    def joined(pick: Callable[[Piece], Array]) -> Array:
        return np.concatenate([pick(piece).reshape(-1) for piece in subject.wrong])

    value_n, due_n = joined(lambda piece: piece.value), joined(lambda piece: piece.of(subject.due))
    start_n = joined(lambda piece: piece.of(start))
    # Copies are no further evidence.
    num_places = sum({(piece.start, piece.stop): piece.value.size for piece in subject.wrong}.values())
    taken, step, off = value_n - start_n, due_n - start_n, value_n - due_n
    for limit in (EXACT, ROUGH):
        if not believable(num_places - 1, 1.0, limit):
            return None
        found = _multiple(subject, taken, step, off, limit)
        found = found or _decay(subject, off, start_n if limit == EXACT else (start_n + due_n) / 2, limit)
        if found is not None:
            return found
    return None


def _multiple(subject: Subject, taken: Array, step: Array, off: Array, limit: float) -> Diagnosis | None:
    factor = _coefficient(taken, step, off, limit)
    if factor is None:
        return None
    times = number_words(factor) if limit == EXACT else f"about {factor:.1f}"
    seen = f"moved by {times} × the reference's step {subject.place()}"
    if factor < 0:
        cause = "the update goes in the opposite direction"
    elif limit == EXACT and abs(factor - round(factor)) < EXACT:
        cause = f"the step was taken {round(factor)} times, or with {round(factor)} times the learning rate"
    else:
        cause = "another learning rate, or another number of steps"
    return Diagnosis(Kind.STEP_SCALED, seen, cause, factor=factor)


def _decay(subject: Subject, off: Array, weights: Array, limit: float) -> Diagnosis | None:
    rate = _coefficient(off, weights, off, limit)
    if rate is None:
        return None
    sign = "+" if rate > 0 else "−"
    seen = f"off by {sign}{abs(rate):.2g} × the weights themselves {subject.place()}"
    cause = "weight decay is missing" if rate > 0 else "weight decay is applied where none is due, or twice"
    return Diagnosis(Kind.WEIGHT_DECAY, seen, cause, factor=rate)


def _coefficient(value: Array, of: Array, off: Array, limit: float) -> float | None:
    """c of value ≈ c · of, when what it leaves over is small beside what there is to explain."""
    energy = float(of @ of)
    if energy == 0.0:
        return None
    factor = float(value @ of) / energy
    left = float(np.linalg.norm(value - factor * of))
    return factor if left <= limit * float(np.linalg.norm(off)) else None
