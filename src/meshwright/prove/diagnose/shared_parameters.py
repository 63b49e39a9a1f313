"""Whose parts are in the gradient of a parameter that stages share: what goes wrong in the sum over its copies.

The reference knows the part of each stage. A rank that should hold the sum of all holds its own stages' only, lacks a
rank's, or holds another parameter's in their place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.prove.compare.result import Diagnosis, Kind
from meshwright.prove.compare.tensor_shards import Array, Piece, coordinates, difference
from meshwright.prove.diagnose.fit_contributions import Puzzle, part_weights
from meshwright.prove.diagnose.phrases import EVERYWHERE, join_words, number_words, place_words, rank_words
from meshwright.prove.diagnose.suspect import Subject
from meshwright.prove.stage_placement import Stages

MAX_LISTED = 4
Mask = npt.NDArray[np.bool_]
Weights = dict[int, Array]
"""By rank of the pipeline: how often each stage's part is in what it holds."""


@dataclass(frozen=True, eq=False)
class SharedParts:
    """What copies of shared parameters add to their gradients."""

    stages: Stages
    by_name: Mapping[str, Array]
    """[stage, *shape]"""

    def loud(self, name: str) -> Mask:
        """[stage]: whether its part is anything at all."""
        return np.asarray(self.by_name[name].reshape(len(self.stages.ranks), -1).any(axis=1))

    def on_rank(self, name: str, pp: int) -> list[int]:
        """The stages with a copy on a rank of the pipeline."""
        return [stage for stage in self.stages.sharing(name) if self.stages.ranks[stage] == pp]


def diagnose_shared(subject: Subject, shared: SharedParts | None) -> Diagnosis | None:
    """A wrong sum over the copies of a shared parameter."""
    name = subject.assembly.name
    if shared is None or name not in shared.by_name:
        return None
    pools: dict[int, list[Piece]] = defaultdict(list)
    for piece in subject.wrong:
        pools[coordinates(subject.counts.axes)[piece.rank]["pp"]].append(piece)
    weights = {pp: _weights(subject, pool, shared.by_name[name]) for pp, pool in sorted(pools.items())}
    known = {pp: found for pp, found in weights.items() if found is not None}
    if len(known) < len(weights):
        return _other_key(subject, pools, shared)
    place = place_words(subject.wrong_ranks, subject.speaking, subject.counts.axes)
    only = "" if place == EVERYWHERE else f", {place}"
    own = _own_parts(subject, known, shared, only)
    return own or _uniform(name, known, shared, only) or _listed(known, only)


def _weights(subject: Subject, pool: list[Piece], parts: Array) -> Array | None:
    """[stage]: how much of each stage's part is in these pieces; 1 of parts that are nothing."""
    values = np.concatenate([piece.value.reshape(-1) for piece in pool])
    inside = np.concatenate([parts[(slice(None), *piece.box())].reshape(len(parts), -1) for piece in pool], axis=1)
    some = np.flatnonzero(np.abs(inside).max(axis=1) > 0)
    num_places = sum({(piece.start, piece.stop): piece.value.size for piece in pool}.values())
    found = part_weights(Puzzle(values, inside[some][None], subject.counts, num_places))
    if found is None:
        return None
    weights = np.ones(len(parts))
    weights[some] = found
    return weights


def _own_parts(subject: Subject, weights: Weights, shared: SharedParts, only: str) -> Diagnosis | None:
    """Each rank holds what its own stages gave."""
    name = subject.assembly.name
    loud = shared.loud(name)
    own = {pp: shared.on_rank(name, pp) for pp in weights}
    several = any(len(found) > 1 for found in own.values())
    one_rank = len({shared.stages.ranks[stage] for stage in shared.stages.sharing(name)}) == 1
    over = "the chunks of a rank" if one_rank else "pp and over the chunks of a rank"
    for first, what in ((False, "pp"), (True, over)):
        if (first and not several) or (not first and one_rank):
            continue
        held = {pp: stages[:1] if first else stages for pp, stages in own.items()}
        if all(_holds(found, held[pp], loud) for pp, found in weights.items()):
            seen = f"each rank's copy has only the part of its own {'first stage' if first else 'stages'}{only}"
            if not only:
                return Diagnosis(Kind.SUM_MISSING, seen, f"the sum over {what} is missing")
            listed = [f"of {shared.stages.words(held[pp])}" for pp in weights]
            hold = "holds" if len(subject.wrong_ranks) == 1 else "hold"
            seen = f"{rank_words(subject.wrong_ranks)} {hold} only the part {join_words(listed)}"
            cause = f"the sum over {what} is missing there: other ranks have it"
            return Diagnosis(Kind.SUM_MISSING, seen, cause)
    return None


def _holds(weights: Array, held: Iterable[int], loud: Mask) -> bool:
    """Whether these stages' parts are there once, and no others."""
    due = np.isin(np.arange(len(weights)), list(held))
    return bool(((weights == due) | ~loud).all())


def _uniform(name: str, weights: Weights, shared: SharedParts, only: str) -> Diagnosis | None:
    """All hold the same sum, in which some stages' parts are not there, or more than once."""
    first, stages, loud = next(iter(weights.values())), shared.stages, shared.loud(name)
    if any(not np.array_equal(first, other) for other in weights.values()):
        return None
    lost, odd = np.flatnonzero(first == 0).tolist(), np.flatnonzero(first != 1).tolist()
    if lost == odd:
        seen = f"{_parts(lost, stages)} missing{only}"
        copies = [stage for stage in stages.sharing(name) if loud[stage]]
        if lost == [stage for stage in copies if stages.ranks[stage] in stages.ranks[:stage]]:
            return Diagnosis(Kind.SUM_MISSING, seen, "the sum over the chunks of a rank is missing")
        if not {stages.ranks[stage] for stage in lost} & {stages.ranks[stage] for stage in copies if stage not in lost}:
            return Diagnosis(Kind.PARTS, seen, "what these ranks computed does not enter the sum over pp")
        return Diagnosis(Kind.PARTS, seen, "what these copies got does not enter the sum")
    extra = np.flatnonzero(first > 1).tolist()
    if extra == odd and len({float(first[stage]) for stage in extra}) == 1:
        times = "twice" if first[extra[0]] == 2 else f"{number_words(float(first[extra[0]]))} times"
        seen = f"{_parts(extra, stages).removesuffix(' are').removesuffix(' is')} counted {times}{only}"
        return Diagnosis(Kind.PARTS, seen, "what these copies got enters the sum more than once")
    return None


def _parts(numbers: list[int], stages: Stages) -> str:
    words = stages.words(numbers)
    return f"the parts of {words} are" if len(numbers) > 1 else f"the part of {words} is"


def _listed(weights: Weights, only: str) -> Diagnosis:
    told = []
    for pp, found in list(weights.items())[:MAX_LISTED]:
        odd = [f"{number_words(float(found[s]))} × stage {s}'s" for s in np.flatnonzero(found != 1)[:MAX_LISTED]]
        told.append(f"pp rank {pp}: {', '.join(odd)}")
    seen = f"other combinations of the stages' parts than all once{only}"
    return Diagnosis(Kind.PARTS, seen, f"the copies are not added up as they should be ({'; '.join(told)})")


def _other_key(subject: Subject, pools: Mapping[int, list[Piece]], shared: SharedParts) -> Diagnosis | None:
    """Parts of another shared parameter stand in the place of some ranks' own: the keys are in another order there."""
    own = shared.by_name[subject.assembly.name]
    for name, other in shared.by_name.items():
        if name == subject.assembly.name or other.shape != own.shape:
            continue
        for pp in range(shared.stages.num_ranks):
            here = np.array([rank == pp for rank in shared.stages.ranks]).reshape(-1, *[1] * (own.ndim - 1))
            # What the others hold of it, and what this rank does.
            mixes = [np.where(here, other, own).sum(0), np.where(here, own, other).sum(0)]
            if all(_is_one_of(subject, piece, mixes) for pool in pools.values() for piece in pool):
                seen = f"parts of {name} stand in the place of parts of its own {subject.place()}"
                who = f"pp rank {pp} adds" if shared.stages.num_ranks > 2 else "pp ranks 0 and 1 add"
                than = "in another order than the others" if shared.stages.num_ranks > 2 else "in different orders"
                return Diagnosis(Kind.MOVED, seen, f"{who} up the shared parameters {than}")
    return None


def _is_one_of(subject: Subject, piece: Piece, mixes: list[Array]) -> bool:
    error = difference(piece.value, piece.of(subject.due))[0]
    return any(subject.matches(piece.value, piece.of(mix), error) for mix in mixes)
