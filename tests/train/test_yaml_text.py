"""Manifests are read as the values that they were written from, and show scripts as blocks."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshwright.train.launch.cluster_job import to_yaml

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["yes", "No", "null", "~", "1.5", "0x10", "12:30", "2024-01-01", "a\nb\n", "\na", "a \nb", ""]),
)


@given(st.lists(st.dictionaries(TEXTS, st.one_of(TEXTS, st.booleans(), st.integers(), st.lists(TEXTS))), min_size=1))
def test_values_are_read_as_they_were(documents):
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


def test_scripts_are_blocks_and_nothing_is_an_alias():
    words = ["--out", "mesh.tp=2"]
    value = {"script": "if x; then\n\n    y\nfi\n", "a": words, "b": words}
    assert to_yaml([value, {"c": "yes"}]) == (
        "script: |\n  if x; then\n\n      y\n  fi\na:\n- --out\n- mesh.tp=2\nb:\n- --out\n- mesh.tp=2\n---\nc: 'yes'\n"
    )
