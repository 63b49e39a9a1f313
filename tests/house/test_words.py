"""The checker of words finds what it should, and only that."""

from __future__ import annotations

import pytest

from tests.house.source import Module, Tree
from tests.house.words import word_breaches

PHRASES = [
    "ranks hold whole copies", "the tensor lies as Shard(0)", "a part of a sum", "weight gradients are put off",
    "gradients are added up", "it is handed on", "plans each call anew", "the pictures of a run", "a breach of a rule",
    "a mended operator", "waited in vain in send", "x.toml is no file", "a whole number", "cut into shards",
    "a rank sends 4.76 MiB a step", "1 ranks",
]  # fmt: skip
FINE = [
    "replicated", "is placed as Shard(0)", "11 ranks", "1 rank", "cut off", "a step of the plan", "violation",
    "4.8 MiB per step", "one image", "the first file", "sums are partial",
]  # fmt: skip


def tree_of(tmp_path, text, page=""):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(page)
    return Tree(tmp_path, (Module("src/meshwright/x.py", text),))


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_found_in_messages_and_pages(tmp_path, phrase):
    found = word_breaches(tree_of(tmp_path, f'"""Doc."""\nx = "{phrase}"\n', f"# Page\n\nHere {phrase}.\n"))
    assert [one.partition(" ")[0] for one in found] == ["src/meshwright/x.py:2", "docs/page.md:3"], found


@pytest.mark.parametrize("phrase", FINE)
def test_the_field_s_words_are_fine(tmp_path, phrase):
    assert not word_breaches(tree_of(tmp_path, f'"""Doc."""\nx = "{phrase}"\n', phrase))


@pytest.mark.parametrize(("string", "is_found"), [
    ('f"{len(x)} ranks"', True), ('f"and {len(x) - 1} more ranks failed"', True), ('f"{len(x)} key/value heads"', True),
    ('f"{counted(len(x), \'rank\')}"', False), ('f"{n} of {len(x)} ranks"', False), ('f"{len(x)} has"', False),
    ('f"{4 * 2} ranks"', False),
])  # fmt: skip
def test_a_length_before_a_plural_is_found(tmp_path, string, is_found):
    assert bool(word_breaches(tree_of(tmp_path, f'"""Doc."""\nx = {string}\n'))) is is_found
