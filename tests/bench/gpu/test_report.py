"""Tests of the results' JSON and of the table, which is 80 columns wide whatever it shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright_bench.gpu.cases import Record, State
from meshwright_bench.gpu.report import COLUMNS, Machine, figures, hidden, part_json, table
from meshwright_bench.gpu.runner import Outcome

MACHINE = Machine("NVIDIA H200", {"torch": "2.11.0", "cuda": "13.0"}, "2026-01-02")
WORDS = st.text("abc /.:", max_size=200)
RECORDS = st.builds(
    Record,
    st.sampled_from(["ours.compiled", "x" * 30]),
    st.sampled_from(State),
    WORDS,
    st.floats(0, 1000),
    st.dictionaries(st.sampled_from(["tokens_per_s", "peak_bytes"]), st.none() | st.floats(0, 1e12)),
)


@given(st.sampled_from(State), WORDS, st.lists(RECORDS, max_size=4))
def test_the_table_has_all_parts_in_80_columns(state, why, records):
    outcomes = [Outcome("capture", state, why, 12.3, tuple(records)), Outcome("profile", State.NOT_RUN, "no time left")]
    lines = list(table(outcomes, {"capture": ["*"]}))
    assert max(map(len, lines)) <= COLUMNS
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["part", "capture", "profile"]


def test_the_table_says_why_a_part_and_each_case_failed_and_shows_key_figures_only():
    records = (
        Record("a", State.PASSED, figures={"tokens_per_s": 54_100.4, "mfu": 0.5}),
        Record("b", State.FAILED, "wrong"),
        Record("c", State.NOT_RUN, "torchao not installed"),
    )
    shown = "\n".join(table([Outcome("train", State.FAILED, "b: wrong", 60.0, records)], {"train": ["*.tokens_per_s"]}))
    assert "1 of 3 cases passed" in shown and "c not run: torchao not installed" in shown
    assert shown.count("wrong") == 1
    assert "a.tokens_per_s  54,100" in shown and "mfu" not in shown


def test_json_names_the_device_versions_and_date_and_no_folder():
    outcome = Outcome(
        "train", State.FAILED, "a: no file /home/me/runs/x", 1.26, (Record("a", State.FAILED, "/home/me"),)
    )
    found = part_json(outcome, MACHINE, hide={"/home/me": "~", "/": "ROOT"})
    assert found["device"] == "NVIDIA H200" and found["versions"] == {"torch": "2.11.0", "cuda": "13.0"}
    assert found["why"] == "a: no file ~/runs/x"
    assert found["cases"][0]["note"] == "~"
    assert found["seconds"] == 1.3


def test_the_longest_folder_is_hidden_first():
    assert hidden("/a/b/c and /a/d", {"/a": "A", "/a/b": "B"}) == "B/c and A/d"


def test_figures_are_named_after_their_case_and_rounded_to_what_is_no_noise():
    records = [
        Record("a", State.PASSED, figures={"x": 123_456.7, "y": None}),
        Record("b", State.PASSED, figures={"x": 2}),
    ]
    assert figures(records) == {"a.x": 123_460.0, "a.y": None, "b.x": 2.0}
