"""The groups of a plan hold each trained parameter once, with the settings that the optimizer gives it."""

from __future__ import annotations

import pytest

from meshwright.cli.plan_page import COLUMNS, optimizer_groups, page
from meshwright.config.facts_for_family import model_facts
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load

WORDS = ("train.optimizer=muon", 'train.parameter_groups=["embedding:lr=0.01","*.wo.weight:weight_decay=0"]')


@pytest.mark.parametrize("layout", [(), ("mesh.pp=2", "train.num_microbatches=2"), ("mesh.dp_shard=2", "mesh.tp=2")])
def test_each_parameter_is_in_one_group(layout: tuple[str, ...]) -> None:
    config = load("llama-tiny", [*WORDS, *layout])
    groups, facts = optimizer_groups(make_plan(config), config.train), model_facts(config)
    assert sorted(name for group in groups for name in group["parameters"]) == sorted(facts.parameter_names())
    assert sum(group["elements"] for group in groups) == facts.num_params()
    found = {(one["optimizer"], one["role"], one["lr"], one["weight_decay"]): len(one["parameters"]) for one in groups}
    lr, decay = config.train.lr, config.train.weight_decay
    assert found == {
        ("muon", "matrix", lr, decay): 6 * 4,
        ("muon", "matrix", lr, 0.0): 4,
        ("adamw", "embedding", 0.01, decay): 1,
        ("adamw", "head", lr, decay): 1,
        ("adamw", "vector", lr, 0.0): 9,
    }


def test_the_page_lists_them() -> None:
    config = load("llama-tiny", WORDS)
    lines = list(page(config.name, make_plan(config), config=config))
    start = lines.index("optimizer groups")
    assert lines[start + 1 : start + 6] == [
        "  matrix · muon · 24 parameters, 721 k · decay 0.1",
        "  matrix · muon · 4 parameters, 65.5 k · no decay",
        "  embedding · adamw · 1 parameter, 32.8 k · decay 0.1 · lr 0.01",
        "  head · adamw · 1 parameter, 32.8 k · decay 0.1",
        "  vector · adamw · 9 parameters, 1.15 k · no decay",
    ]
    assert all(len(line) <= COLUMNS for line in lines)
    from_file = list(page(config.name, make_plan(config)))  # without the configuration
    assert "  matrix · muon · 28 parameters, 786 k" in from_file
