"""Random valid tables, with any placement and any order that respects data dependencies. Torch-free."""

from __future__ import annotations

from random import Random

from meshwright.errors import ScheduleError
from meshwright.pipeline import Action, ActionKind, Overlap, Schedule, verify

K = ActionKind


def random_table(random: Random, *, splits: bool = True, overlaps: bool = True) -> Schedule:
    """Draw a compute-only table by running ranks at random: any action whose inputs are ready may be next.

    Args:
        random: source of randomness.
        splits: split some backwards into I and W.
        overlaps: overlap some adjacent actions.
    """
    num_ranks = random.randint(1, 4)
    num_microbatches = random.randint(1, 4)
    placed = [*range(num_ranks), *(random.randrange(num_ranks) for _ in range(random.randint(0, 3)))]
    random.shuffle(placed)
    rows: list[list[Action | Overlap]] = [[] for _ in range(num_ranks)]
    todo: set[tuple[K, int, int]] = set()
    for stage in range(len(placed)):
        for m in range(num_microbatches):
            is_split = splits and random.random() < 0.5
            todo |= {(kind, stage, m) for kind in ((K.FORWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT) if is_split
                                                   else (K.FORWARD, K.BACKWARD))}  # fmt: skip
    done: set[tuple[str, int, int]] = set()
    while todo:
        ready = sorted((key for key in todo if _needs(key, len(placed)) <= done), key=str)
        kind, stage, m = key = random.choice(ready)
        todo.remove(key)
        done.add((_side(kind), stage, m))
        rows[placed[stage]].append(Action(kind, stage, m))
    table = Schedule("random", num_microbatches, tuple(placed), tuple(map(tuple, rows)))
    return _with_overlaps(table, random) if overlaps else table


def _side(kind: K) -> str:
    return "B" if kind in (K.BACKWARD, K.BACKWARD_INPUT) else kind.value


def _needs(key: tuple[K, int, int], num_stages: int) -> set[tuple[str, int, int]]:
    kind, stage, m = key
    if kind is K.FORWARD:
        return {("F", stage - 1, m)} if stage else set()
    if kind is K.BACKWARD_WEIGHT:
        return {("B", stage, m)}
    return {("F", stage, m)} | ({("B", stage + 1, m)} if stage + 1 < num_stages else set())


def _with_overlaps(table: Schedule, random: Random) -> Schedule:
    """Try to overlap adjacent actions; `verify` rejects invalid pairs."""
    for _ in range(2):
        rank = random.randrange(table.num_ranks)
        row = table.actions[rank]
        if len(row) < 2:
            continue
        at = random.randrange(len(row) - 1)
        first, second = row[at], row[at + 1]
        if isinstance(first, Overlap) or isinstance(second, Overlap):
            continue
        joined = (*row[:at], Overlap(first, second), *row[at + 2 :])
        tried = Schedule(
            table.kind, table.num_microbatches, table.stage_ranks,
            tuple(joined if r == rank else other for r, other in enumerate(table.actions)),
        )  # fmt: skip
        try:
            verify(tried)
        except ScheduleError:
            continue
        table = tried
    return table
