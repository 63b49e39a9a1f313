"""A family that is named outside its folder is found; presets' names and other words are not taken for one."""

from __future__ import annotations

import pytest

from tests.house.families import family_breaches
from tests.house.plant import plant

FAMILIES = {"models/llama/family.py": "", "models/dit/family.py": "", "models/contract/family.py": ""}
NAMED = {
    "an import": ("train/run.py", "from meshwright.models.llama.module import X"),
    "a class": ("train/run.py", "x = isinstance(model, DiTConfig)"),
    "a class with a number": ("plan/make.py", "Llama3Rope = 1"),
    "a string": ("config/rules.py", "if config.model.kind == 'dit': pass"),
    "a comment": ("plan/memory.py", "# as a Llama has it"),
    "another family's folder": ("models/dit/rules.py", "# as llama"),
    "the contract": ("models/contract/facts.py", "LLAMA = 1"),
}


@pytest.mark.parametrize("path, text", NAMED.values(), ids=NAMED)
def test_a_name_outside_the_folder_is_caught(tmp_path, path, text):
    (breach,) = family_breaches(plant(tmp_path, {**FAMILIES, path: text}))
    assert breach.startswith(f"src/meshwright/{path}:1 names the family")


def test_other_words_are_none(tmp_path):
    presets = {"config/presets/llama-tiny.toml": "", "config/presets/dit-digits.toml": ""}
    files = {"models/llama/module.py": "class Llama: pass", "config/load.py": "DEFAULT = 'llama-tiny'  # or dit-digits",
             "nn/a.py": "# conditions, additions, edited editors"}  # fmt: skip
    assert family_breaches(plant(tmp_path, {**FAMILIES, **presets, **files})) == []


def test_a_benchmark_may_have_a_familys_name(tmp_path):
    text = 'class Benchmark(StrEnum):\n    IMAGES = "dit"\n'
    assert family_breaches(plant(tmp_path, {**FAMILIES, "meshwright_bench/benchmarks.py": text})) == []
    others = {"plan/kinds.py": text, "meshwright_bench/benchmarks.py": "x = 'dit'"}
    elsewhere = plant(tmp_path / "2", {**FAMILIES, **others})
    assert len(family_breaches(elsewhere)) == 2
