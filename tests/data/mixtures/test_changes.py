"""How the sources of a run differ from those of an earlier one, in words."""

from __future__ import annotations

import pytest

from meshwright.models.tasks.text_sources import changes

OURS = {"mixture": ("0.7:web", "0.2:code", "0.1:books"), "source": "stdlib", "validation_source": None}


@pytest.mark.parametrize(("now", "says"), [
    (("0.7:web", "0.2:code", "0.1:books"), []),
    (("7:web", "2:code", "1:books"), []),
    (("0.6:web", "0.3:code", "0.1:books"),
     ["the weight of web was 70% and is 60%", "the weight of code was 20% and is 30%"]),
    (("0.7:web", "0.2:code", "0.05:books", "0.05:new#text"),
     ["new#text was added", "the weight of books was 10% and is 5%"]),
    (("0.7:web", "0.3:code"), ["books was removed", "the weight of code was 20% and is 30%"]),
    (("0.2:code", "0.7:web", "0.1:books"), ["the sources are in another order"]),
    ((), ["data.mixture was set and is not set"]),
])  # fmt: skip
def test_sources_added_and_removed_and_weights(now, says):
    assert changes(OURS, {**OURS, "mixture": now}) == says


def test_other_sources_are_named():
    one = {"mixture": (), "source": "a", "validation_source": None}
    assert changes(one, {**one, "source": "b"}) == ["data.source was a and is b"]
    assert changes(one, {**one, "validation_source": "v"}) == ["data.validation_source was not set and is v"]
    assert changes({"source": "a"}, one) == [], "of a version without these keys"
    assert changes({**OURS, "source": "x"}, OURS) == [], "which has no effect beside a mixture"
    assert changes({**OURS, "mixture": ["no weight"]}, OURS) == ["data.mixture was ['no weight']"]
