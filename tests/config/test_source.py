"""A configuration as TOML is the same when it is read again, and the presets are the published models."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import run_type
from meshwright.config.source import preset_names, to_toml
from meshwright.plan.rules import load

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
positive = st.floats(min_value=1e-300, allow_infinity=False, allow_nan=False, exclude_min=True)
sizes = st.integers(1, 2**62)


def again(config, folder):
    (folder / "config.toml").write_text(to_toml(config), "utf-8")
    return load(str(folder / "config.toml"))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_comes_back(name, tmp_path):
    assert again(load(name), tmp_path) == load(name)


def test_words_come_back(tmp_path):
    config = load(None, ["mesh.dp_shard=2", "mesh.tp=2", "data.source=a b/'c\"d'\\e.txt", "train.precision=float64",
                         "model.rope_scaling={}", "model.head_dim=48", "name=x y"])  # fmt: skip
    assert config.model.rope_scaling is not None
    assert again(config, tmp_path) == config


@given(
    st.fixed_dictionaries(
        {
            "name": text.filter(lambda name: "/" not in name and "\0" not in name),
            "data": st.fixed_dictionaries({"source": text, "cache_dir": st.none() | text}),
            "train": st.fixed_dictionaries(
                {"lr": positive, "eps": positive, "seed": st.integers(0, 2**63 - 1), "compile": st.booleans(),
                 "precision": st.sampled_from(["float32", "bfloat16", "float64"]),
                 "threads": st.none() | st.integers(1, 1024)}
            ),
            "model": st.fixed_dictionaries(
                {"rope_theta": positive, "norm_eps": positive, "head_dim": st.none() | sizes.map(lambda n: n + 1),
                 "rope_scaling": st.none() | st.fixed_dictionaries({"factor": positive, "original_seq_len": sizes})}
            ),
        }
    )
)  # fmt: skip
def test_any_values_come_back(values):
    kind = run_type("llama")
    config = kind.model_validate(values)
    assert kind.model_validate(tomllib.loads(to_toml(config))) == config


# Counted from the sizes in the models' own config.json on Hugging Face, which round to the published 8.03, 70.6 and
# 405.85 billion (The Llama 3 herd of models, 2024).
PUBLISHED = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name, count):
    assert model_facts(load(name)).num_params() == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_architecture_of_llama_3(name):
    spec = load(name).model.spec()
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.rope_theta) == (8, 128, 128256, 500000.0)
    assert not spec.tie_embeddings and spec.norm_eps == 1e-5
    assert (spec.rope_scaling is not None) == (name == "llama3-405b")  # scaling came with 3.1, of which 405B is one
