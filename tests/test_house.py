"""The house rules, checked on this repository; `house/` holds the checkers and tests that they can fail."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from tests.house.families import family_breaches
from tests.house.figures import figure_breaches
from tests.house.floors import floor_breaches, graph_breaches, torch_breaches
from tests.house.names import collective_breaches, private_breaches
from tests.house.paths import path_breaches
from tests.house.source import Tree
from tests.house.style import style_breaches
from tests.house.where import where_breaches
from tests.house.words import word_breaches

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree.read(ROOT)


def test_the_package_is_there(tree):
    assert len(tree.package) > 10


@pytest.mark.parametrize(
    "checker",
    [
        floor_breaches,
        graph_breaches,
        torch_breaches,
        collective_breaches,
        private_breaches,
        style_breaches,
        where_breaches,
        family_breaches,
        figure_breaches,
        word_breaches,
    ],
)
def test_the_house_rules_hold(tree, checker):
    breaches = checker(tree)
    assert not breaches, "\n" + "\n".join(breaches)


def test_no_path_of_one_machine(monkeypatch):
    monkeypatch.setenv("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    breaches = path_breaches(ROOT)
    assert not breaches, "\n" + "\n".join(breaches)
