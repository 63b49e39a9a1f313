"""`config.json`: values are read correctly or rejected by key."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import CheckpointError
from meshwright.models.decoder.description import RopeScaling
from meshwright.models.huggingface.checks import read_object
from meshwright.models.llama.family import LlamaSpec
from meshwright.models.llama.hf_llama import config_from_model, model_from_config
from tests.helpers import clean_environment

MODEL = LlamaSpec(2, 32, 4, 2, 48, 64, 8, rope_scaling=RopeScaling(original_seq_len=16)).identity()
CONFIG = config_from_model(MODEL, dtype="float32", max_seq_len=None)
SCALING = CONFIG["rope_scaling"]
LEFT_OUT = object()


def changed(**changes):
    return {key: value for key, value in (CONFIG | changes).items() if value is not LEFT_OUT}


def scaled(**changes):
    return {"rope_scaling": SCALING | changes}


def refused(config):
    with pytest.raises(CheckpointError) as caught:
        model_from_config(config, where="hf/config.json")
    error = caught.value
    assert error.where.startswith("hf/config.json") and error.rule and error.fix
    return error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps = None"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0"),
        ({"rope_scaling": "llama3"}, "rope_scaling = 'llama3'"),
        ({"rope_parameters": [1], "rope_scaling": None}, r"rope_parameters = [1]"),
        (scaled(factor="x"), "rope_scaling.factor = 'x'"),
        (scaled(factor=None), "rope_scaling.factor = None"),
        (scaled(rope_type=3), "rope_scaling.rope_type = 3"),
        (scaled(rope_theta="x"), "rope_scaling.rope_theta = 'x'"),
        (scaled(low_freq_factor=0), "rope_scaling.low_freq_factor = 0"),
        (scaled(low_freq_factor=4.0), "rope_scaling.high_freq_factor = 4.0"),
        (scaled(original_max_position_embeddings=-5), "rope_scaling.original_max_position_embeddings = -5"),
        (scaled(original_max_position_embeddings=None) | {"max_position_embeddings": None}, "no max_position_embedd"),
        ({"architectures": 3}, "architectures = 3"),
        ({"architectures": [3]}, "architectures.0 = 3"),
        ({"model_type": LEFT_OUT}, "no model_type"),
        ({"model_type": ["llama"]}, "model_type = ['llama']"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"hidden_size": LEFT_OUT}, "no hidden_size"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"head_dim": None, "hidden_size": 3}, "head_dim = 0"),
        ({"vocab_size": {}}, "vocab_size = {}"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
        ({"quantization_config": {"a": "x" * 500}}, "quantization_config = "),
    ],
)
def test_a_value_that_can_not_be_is_named(changes, words):
    error = refused(changed(**changes))
    assert words in error.what and len(error.what) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(key=st.sampled_from(sorted(CONFIG)), inner=st.none() | st.sampled_from(sorted(SCALING)), value=JSON)
def test_whatever_stands_there_is_read_or_refused(key, inner, value):
    changes = {key: value} if inner is None else {"rope_scaling": SCALING | {inner: value}}
    try:
        model = model_from_config(changed(**changes), where="hf/config.json")
    except CheckpointError as error:
        assert error.where and error.rule and error.fix
    else:
        LlamaSpec(**{name: value for name, value in model.items() if name not in ("kind", "rope_scaling")})
        assert json.loads(json.dumps(model, allow_nan=False)) == model
        assert all(model[name] > 0 for name in ("num_layers", "dim", "head_dim", "norm_eps", "rope_theta"))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"head_dim": None}, {}),
        ({"tie_word_embeddings": None}, {}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"rms_norm_eps": LEFT_OUT}, {"norm_eps": 1e-6}),
        ({"rope_theta": None, "rope_parameters": None}, {}),
        ({"rope_theta": 5, "rope_scaling": SCALING | {"rope_theta": 7}}, {"rope_theta": 7.0}),
        (scaled(original_max_position_embeddings=LEFT_OUT), {}),
        ({"architectures": None}, {}),
        ({"rope_scaling": None, "rope_parameters": None}, {"rope_scaling": None}),
    ],
)
def test_null_and_left_out_as_transformers_takes_them(changes, found):
    if "rope_scaling" in changes and changes["rope_scaling"]:
        scaling = {key: value for key, value in changes["rope_scaling"].items() if value is not LEFT_OUT}
        changes = changes | {"rope_scaling": scaling, "max_position_embeddings": 16}
    assert model_from_config(changed(**changes), where="config.json") == MODEL | found


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"3", b"null"])
def test_files_that_hold_no_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config.json is not") as caught:
        read_object(tmp_path / "config.json")
    assert len(caught.value.what) < 300


def test_reading_them_needs_no_torch():
    code = "import sys\nfrom meshwright.models.llama import hf_llama\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=clean_environment(PYTHONDONTWRITEBYTECODE="1"))
