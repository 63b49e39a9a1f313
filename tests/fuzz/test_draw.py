"""Cases follow from seed and number alone, mostly fit together, and leave no key out that a schema describes."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from functools import cache

import pytest

from meshwright.comm.compression.catalogue import METHODS
from meshwright.config.overlay import fields, is_valid
from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import family_names
from meshwright.models.dit.description import UNUSED_KEYS
from meshwright.optim.catalogue import BUILT_IN
from meshwright.pipeline.generate import ScheduleKind
from tests.fuzz.case import Case, key_of, schema_values
from tests.fuzz.draw import ALWAYS, AXES, NEVER, draw
from tests.helpers import outcome

PURE = ("dit", "llama", "moe")
"""Families whose models are described without torch."""


@cache
def cases() -> list[Case]:
    return [draw(1, number) for number in range(2000)]


def test_a_seed_and_a_number_are_a_case() -> None:
    assert draw(3, 14) == draw(3, 14)
    assert len({draw(seed, number) for seed in range(5) for number in range(40)}) == 200


def test_a_command_gives_the_case_back() -> None:
    for case in cases()[:60]:
        command, verb, preset, *words = shlex.split(case.command())
        assert (command, verb, Case(preset, tuple(words))) == ("meshwright", "run", case)


@pytest.mark.parametrize("kind", family_names())
def test_every_key_of_a_schema_is_drawn(kind: str) -> None:
    drawn = {key_of(word) for case in cases() if case.kind == kind for word in case.words}
    known = {key for key, field in fields(kind).items() if schema_values(field)}
    assert known - drawn <= NEVER.keys() | (UNUSED_KEYS.keys() if kind == "dit" else set())


def test_every_name_of_a_catalogue_is_drawn() -> None:
    words = Counter(word for case in cases() for word in case.words)
    names = [f"pipeline.schedule={kind.value}" for kind in ScheduleKind]
    names += [f"train.optimizer={name}" for name in BUILT_IN if name != "adamw"]
    names += [f"comm.gradients={method.name}" for method in METHODS if method.codec.value != "exact"]
    assert all(words[name] >= 3 for name in names), [name for name in names if words[name] < 3]


@pytest.mark.parametrize("kind", family_names())
def test_values_of_a_schema_are_valid(kind: str) -> None:
    for key, field in fields(kind).items():
        assert all(is_valid(kind, key, value) for value in schema_values(field)), key


def test_cases_are_small() -> None:
    for case in cases():
        sizes = [int(case.value(f"mesh.{axis}") or 1) for axis in AXES]
        assert math.prod(sizes) <= 12, case.command()  # 8, or one axis a rank larger by a slip
        assert ALWAYS.keys() <= {key_of(word) for word in case.words}


def test_most_cases_are_valid() -> None:
    found = [outcome(case.words, case.preset) for case in cases()[:120] if case.kind in PURE]
    valid = sum(isinstance(one, RunConfig) for one in found)
    assert 0.5 * len(found) <= valid < len(found)
