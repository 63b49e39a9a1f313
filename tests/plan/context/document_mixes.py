"""Fifty mixes of document lengths, drawn once: log-normal, power law, one huge and many tiny, all equal."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

SEQ_LEN = 32_768


def _lognormal(random: Random) -> Iterator[int]:
    while True:
        yield int(random.lognormvariate(6, 1.2))


def _power_law(random: Random) -> Iterator[int]:
    while True:
        yield int(32 * random.paretovariate(0.8))


def _one_huge(random: Random) -> Iterator[int]:
    for _ in range(random.randrange(300)):
        yield random.randrange(1, 64)
    yield random.randrange(SEQ_LEN // 2, SEQ_LEN)
    while True:
        yield random.randrange(1, 64)


def _equal(random: Random) -> Iterator[int]:
    length = random.choice([16, 100, 1000, 3000, 3277, 5000, 8192, 12_000])
    while True:
        yield length


def document_mix(seed: int) -> tuple[int, ...]:
    """Lengths of a sample's documents, the last one shortened to fit."""
    lengths: list[int] = []
    source = (_lognormal, _power_law, _one_huge, _equal)[seed % 4](Random(seed))
    while (space := SEQ_LEN - sum(lengths)) > 0:
        lengths.append(min(space, max(1, next(source))))
    return tuple(lengths)


MIXES = [document_mix(seed) for seed in range(50)]
