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


REPORT = Report("train", cpu_name(), "2026-01-31", FIGURES, ("a: this against that",))


def test_json_has_exactly_the_documented_keys_and_rounded_values():
    answer = json.loads(json.dumps(as_json(REPORT)))
    assert set(answer) == {"part", "device", "date", "versions", "figures"}
    assert answer["part"] == "train" and answer["versions"] == versions()
    assert set(answer["versions"]) == {"python", "torch", "numpy", "meshwright"}
    figures = answer["figures"]
    assert all(value is None or isinstance(value, float) for value in figures.values())
    assert (figures["a.ratio"], figures["a.ratio_min"], figures["a.ratio_max"]) == (0.98123, 0.95, 1.02)
    assert figures["c.ratio"] is None


def test_the_table_shows_machine_date_notes_units_and_targets():
    head, what, *lines = table(REPORT)
    assert all(word in head for word in ("train", REPORT.device, REPORT.date, versions()["torch"]))
    assert "core" in REPORT.device and what == "a: this against that" and lines[-1] == "missed: b.ratio"
    by_name = {line.split()[0]: line for line in lines if line}
    assert "✓ met" in by_name["a.ratio"] and "0.95 … 1.02" in by_name["a.ratio"]
    assert "✗ MISSED" in by_name["b.ratio"]
    assert "unmeasured: needs a CUDA device" in by_name["c.ratio"] and "≥ 0.98" in by_name["c.ratio"]
    assert "met" not in by_name["c.ratio"].lower().replace("unmeasured", "")
    assert "53,210" in by_name["a.tokens_per_s"]
    assert "75.0  " in by_name["c.memory"] and "GiB" in by_name["c.memory"]


def test_reports_contain_no_host_names_or_paths():
    text = json.dumps(as_json(REPORT)) + "\n".join(table(REPORT))
    assert socket.gethostname() not in text
    assert "/home" not in text and "site-packages" not in text


@pytest.mark.parametrize("value, expected", [(0.97, True), (0.9699, False), (None, None)])
def test_is_met(value, expected):
    assert Figure("x", value, at_least=0.97).is_met is expected
    assert Figure("x", None if value is None else -value, at_most=-0.97).is_met is expected
    assert Figure("x", value).is_met is None
