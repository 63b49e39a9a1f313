"""Errors keep their fields on the way between processes, and say which exit code they mean."""

from __future__ import annotations

import pickle

import pytest

from meshwright import errors
from meshwright.errors import InputError, MeshwrightError, RunError, StoppedError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MeshwrightError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_travel_whole(kind):
    error = kind("what", where="where", rule="rule", fix="fix")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and vars(again) == vars(error) and str(again) == str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_exit_codes(kind):
    assert kind("x").exit_code == (2 if issubclass(kind, InputError) else 3 if kind is StoppedError else 1)


def test_text_has_the_parts_that_are_there():
    assert str(RunError("what", fix="do this")) == "what\nfix    do this"
    assert str(InputError("a", where="b", rule="c", fix="d")).splitlines() == ["a", "where  b", "rule   c", "fix    d"]
