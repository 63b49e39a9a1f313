"""What `to_yaml` writes is read by PyYAML, a parser of YAML 1.1, as the same values."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshwright.train.launch.scripts.yaml_text import to_yaml

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text("ab \t\n:#-'\"{}$|>&*!%@`\\", max_size=12),
    st.sampled_from(
        ["yes", "No", "null", "~", "1.5", "0x10", "1e3", "12:30", "2024-01-01", ".inf", "=", "<<", "", "-"]
    ),
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.booleans(), st.integers()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_values_are_read_as_they_were(value):
    assert yaml.safe_load(to_yaml(value)) == value


def test_scripts_are_blocks_and_ordinary_words_have_no_quotes():
    value = {
        "a": [{"script": "if x; then\n\n    y\nfi\n", "count": 1}, "--out", "mesh.tp=2"],
        "b": {"c": "yes", "d": True},
    }
    assert to_yaml(value) == (
        "a:\n- script: |\n    if x; then\n\n        y\n    fi\n  count: 1\n- --out\n- mesh.tp=2\n"
        'b:\n  c: "yes"\n  d: true\n'
    )


@pytest.mark.parametrize("text", ["a\n\n", "a", " a\n", "a \nb\n", "\na\n", "a\x07\n", "a\nb"])
def test_text_that_a_block_would_change_is_quoted(text):
    written = to_yaml({"a": text})
    assert "|" not in written and yaml.safe_load(written) == {"a": text}
