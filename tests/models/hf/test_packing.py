"""Types of models keep packed documents apart or are refused, as a small model of the type shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.models.foreign.packing import why_not_packed
from meshwright.models.hf.origin import TransformersModel
from meshwright.models.hf.source import Source
from tests.models.hf.runs import hf_config

pytest.importorskip("transformers")


@pytest.mark.parametrize("model", ["qwen3", "gemma3_text", "mixtral"])
def test_masks_made_from_positions_keep_documents_apart(model: str) -> None:
    assert why_not_packed(TransformersModel(Source(model))) == ""


@pytest.mark.parametrize("model", ["mamba", "opt", "falcon"])
def test_states_and_masks_of_a_models_own_do_not(model: str) -> None:
    assert why_not_packed(TransformersModel(Source(model))) != ""


def test_a_model_whose_documents_see_each_other_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="data.packing = documents: a document's logits depend on the document"
    ) as found:
        hf_config("mamba", "data.packing=documents", cache=tmp_path)
    assert found.value.fix == "data.packing=none"
