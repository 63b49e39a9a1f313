"""Proofs of many models in one go: outcomes, reasons, and what an error of one case does to the others."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest

from meshwright.errors import LayoutError, ModelError
from meshwright.plan.rules import load
from meshwright.prove import catalogue
from meshwright.prove.catalogue import LAYOUTS, SETTINGS, Outcome, Result, counts, first_line, prove_all, table

DP, PP, TP = "dp_shard 2", "pp 2", "tp 2"
RESULTS = [
    Result("qwen3", TP, Outcome.PROVED),
    Result("gpt2", TP, Outcome.WRONG, "the sum over tp is missing"),
    Result("mamba", TP, Outcome.REFUSED, "no plan | shards nothing\nand more"),
    Result("gpt2", DP, Outcome.FAILED, "RuntimeError: size\nTraceback"),
    Result("qwen3", DP, Outcome.PROVED),
]


def test_the_table_has_a_row_a_model_and_the_reasons() -> None:
    head, ruler, *rows = table(RESULTS)
    assert head == "| model | dp_shard 2 | tp 2 | why not |" and ruler.count("|") == head.count("|")
    assert rows == [
        "| gpt2 | ✗ | ✗ | RuntimeError: size; the sum over tp is missing |",
        "| mamba |  | – | no plan / shards nothing |",
        "| qwen3 | ✓ | ✓ |  |",
    ]


def test_counts_are_of_models_that_can_be_built() -> None:
    more = [*RESULTS, Result("cpmant", DP, Outcome.NOT_BUILT, "no small configuration")]
    assert counts(more) == ["dp_shard 2: 1 of 2 proved, 0 refused, 1 not", "tp 2: 1 of 3 proved, 1 refused, 1 not"]
    assert counts([]) == []


def test_a_reason_is_one_short_line_of_a_cell() -> None:
    assert first_line("") == "" and first_line("a|b\nc") == "a/b" and len(first_line("x" * 999)) == 160


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (LayoutError("3 heads over 2 ranks", fix="mesh.tp=1"), Outcome.REFUSED),
        (ModelError("its own forward fails"), Outcome.NOT_BUILT),
    ],
)
def test_a_case_that_is_refused_or_not_built_starts_no_process(monkeypatch, error, outcome):
    monkeypatch.setattr(catalogue, "launch", mock.Mock(side_effect=AssertionError("a process was started")))
    said = []
    found = prove_all([("gpt2", TP, mock.Mock(side_effect=error))], steps=2, say=said.append)
    assert found == said == [Result("gpt2", TP, outcome, error.what)]


def config(model, layout):
    return load("hf-tiny", [f"model.config={model}", *SETTINGS, *LAYOUTS[layout]])


def cases(layout, *models):
    return [(model, layout, partial(config, model, layout)) for model in models]


@pytest.mark.slow
def test_diverse_models_are_proved_and_the_cases_after_an_error_still_run(monkeypatch):
    pytest.importorskip("transformers")
    broken, made = "mamba", catalogue.make_plan

    def plan_or_none(config):
        # Without a plan the ranks raise an error.
        return None if broken in str(config.model) else made(config)

    monkeypatch.setattr(catalogue, "make_plan", plan_or_none)
    # Writes to outputs in place, a feed-forward in two modules, experts that all ranks run; a stream [t, b, d];
    # parameters of the root that are stored along another dim than the first.
    wanted = [*cases(TP, "deepseek_v3"), *cases(DP, broken), *cases(TP, "falcon", "bert", "nemotron_h"),
              *cases(PP, "xlnet"), *cases(DP, "phi4_multimodal")]  # fmt: skip
    found = prove_all(wanted, steps=2, say=lambda _: None)
    assert [(one.model, one.layout) for one in found] == [(model, layout) for model, layout, _ in wanted]
    [failed] = [one for one in found if one.outcome is not Outcome.PROVED]
    assert (failed.model, failed.outcome) == (broken, Outcome.FAILED)
    assert "Error" in failed.reason
