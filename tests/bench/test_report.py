"""Tests of the report: the table shows every figure, the JSON has the documented keys."""

from __future__ import annotations

import json
import socket

import pytest

from meshwright_bench.report import Figure, Report, as_json, cpu_name, table, versions

FIGURES = (
    Figure("a.ratio", 0.98123456, "of bare tokens/s", spread=(0.95, 1.02), at_least=0.97),
    Figure("b.ratio", 0.96, "of bare tokens/s", at_least=0.97),
    Figure("a.tokens_per_s", 53210.123, "tokens/s"),
    Figure("c.ratio", None, at_least=0.98, note="needs a CUDA device"),
    Figure("c.memory", 75 * 1024**3, "bytes"),
)


@pytest.fixture
def report() -> Report:
    return Report("train", cpu_name(), "2026-01-31", FIGURES, ("a: this against that",))


def test_json_has_exactly_the_documented_keys(report):
    answer = json.loads(json.dumps(as_json(report)))
    assert set(answer) == {"part", "device", "date", "versions", "figures"}
    assert answer["part"] == "train"
    assert answer["versions"] == versions()
    assert set(answer["versions"]) == {"python", "torch", "numpy", "meshwright"}
    assert all(value is None or isinstance(value, float) for value in answer["figures"].values())


def test_json_values_are_rounded_and_include_the_spread(report):
    figures = as_json(report)["figures"]
    assert figures["a.ratio"] == 0.98123
    assert (figures["a.ratio_min"], figures["a.ratio_max"]) == (0.95, 1.02)


def test_unmeasured_figures_are_null_and_give_the_reason(report):
    assert as_json(report)["figures"]["c.ratio"] is None
    line = next(line for line in table(report) if line.startswith("c.ratio"))
    assert "unmeasured: needs a CUDA device" in line
    assert "≥ 0.98" in line
    assert "met" not in line.lower().replace("unmeasured", "")


def test_a_missed_target_is_shown(report):
    lines = table(report)
    assert any(line.startswith("a.ratio") and "✓ met" in line for line in lines)
    assert any(line.startswith("b.ratio") and "✗ MISSED" in line for line in lines)
    assert lines[-1] == "missed: b.ratio"


def test_the_table_shows_machine_versions_date_and_notes(report):
    head, what, *_ = table(report)
    assert all(word in head for word in ("train", report.device, report.date, versions()["torch"]))
    assert what == "a: this against that"


def test_values_are_formatted_with_units(report):
    text = "\n".join(table(report))
    assert "53,210" in text
    assert "75.0  " in text and "GiB" in text
    assert "0.95 … 1.02" in text


def test_reports_contain_no_host_names_or_paths(report):
    text = json.dumps(as_json(report)) + "\n".join(table(report))
    assert socket.gethostname() not in text
    assert "/home" not in text and "site-packages" not in text


def test_the_cpu_name_includes_the_number_of_cores():
    assert "core" in cpu_name()


@pytest.mark.parametrize("value, expected", [(0.97, True), (0.9699, False), (None, None)])
def test_is_met(value, expected):
    assert Figure("x", value, at_least=0.97).is_met is expected
    assert Figure("x", None if value is None else -value, at_most=-0.97).is_met is expected
    assert Figure("x", value).is_met is None
