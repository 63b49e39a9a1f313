"""Proofs of many models in one go: outcomes, reasons, and what an error of one case does to the others."""

from __future__ import annotations

from functools import partial

import pytest

from meshwright.config.schema import RunConfig
from meshwright.errors import LayoutError, ModelError
from meshwright.plan.rules import load
from meshwright.plan.run_plan import RunPlan
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


def test_a_refused_case_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    def refuse() -> RunConfig:
        raise LayoutError("3 heads over 2 ranks", fix="mesh.tp=1")

    monkeypatch.setattr(catalogue, "launch", launch)
    said: list[Result] = []
    found = prove_all([("gpt2", TP, refuse)], steps=2, say=said.append)
    assert found == said == [Result("gpt2", TP, Outcome.REFUSED, "3 heads over 2 ranks")]


def test_a_model_that_does_not_run_by_itself_counts_as_not_built() -> None:
    def fail() -> RunConfig:
        raise ModelError("its own forward fails")

    assert prove_all([("gpt2", TP, fail)], steps=2, say=lambda _: None) == [
        Result("gpt2", TP, Outcome.NOT_BUILT, "its own forward fails")
    ]


def config(model: str, layout: str) -> RunConfig:
    return load("hf-tiny", [f"model.config={model}", *SETTINGS, *LAYOUTS[layout]])


def cases(models: tuple[str, ...], layouts: tuple[str, ...]) -> list[tuple[str, str, partial[RunConfig]]]:
    return [(model, layout, partial(config, model, layout)) for layout in layouts for model in models]


@pytest.mark.slow
def test_diverse_models_are_proved_and_the_cases_after_an_error_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    broken, made = "mamba", catalogue.make_plan

    def plan_or_none(config: RunConfig) -> RunPlan | None:
        # Without a plan the ranks raise an error.
        return None if broken in str(config.model) else made(config)

    monkeypatch.setattr(catalogue, "make_plan", plan_or_none)
    wanted = [*cases(("deepseek_v3",), (TP,)), *cases((broken,), (DP,))]
    # Writes to outputs in place, a feed-forward in two modules, experts that all ranks run; a stream [t, b, d].
    wanted += [*cases(("falcon", "bert", "nemotron_h"), (TP,)), *cases(("xlnet",), (PP,)), *cases(("gpt2",), (DP,))]
    found = prove_all(wanted, steps=2, say=lambda _: None)
    assert [(one.model, one.layout) for one in found] == [(model, layout) for model, layout, _ in wanted]
    [failed] = [one for one in found if one.outcome is not Outcome.PROVED]
    assert (failed.model, failed.outcome) == (broken, Outcome.FAILED)
    assert "Error" in failed.reason
