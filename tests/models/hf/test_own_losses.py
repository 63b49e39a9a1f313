"""A configuration whose own forward adds a loss is refused, as transformers' loss and its logits say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.errors import ConfigError
from meshwright.models.foreign.probe import probe
from meshwright.models.hf import private
from meshwright.models.hf.config import Source
from meshwright.models.hf.origin import TransformersModel
from meshwright.models.hf.tiny_config import causal_types, tiny_config
from tests.helpers import quick_and_slow
from tests.models.hf.folders import change_config, write_model
from tests.models.hf.runs import hf_config

pytest.importorskip("transformers")


def with_losses(model_type: str, *, wanted: bool, weight: float) -> Any:
    """A tiny configuration whose losses have a weight, and are added or not."""
    with private.quiet():
        config = tiny_config(model_type)
    text = config.get_text_config()
    for part in (text, getattr(text, "ffn_config", None)):
        for name in vars(part) if part is not None else ():
            if "loss" in name and isinstance(getattr(part, name), float):
                setattr(part, name, weight)
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = wanted
    return config


def added(config: Any) -> float:
    """What transformers' model adds to the cross-entropy of its logits."""
    torch.manual_seed(0)
    model = private.causal_lm(config, attention="auto", experts="eager").eval()
    ids = torch.randint(0, 200, (2, 24))
    with torch.no_grad():
        out = model(input_ids=ids, labels=ids, use_cache=False)
    return float(out.loss - F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()))


ADDING = [name for name in causal_types() if "moe" in name or name in ("mixtral", "jamba", "jetmoe", "dbrx", "bamba")]
TYPES = sorted({"mixtral", "jetmoe", "bamba", "dbrx", "glm4_moe", *ADDING[::9]})


@pytest.mark.parametrize("model_type", quick_and_slow(zip(TYPES), [("mixtral",)]))
def test_a_loss_is_refused_if_transformers_adds_one(model_type: str) -> None:
    for wanted, weight in ((False, 5.0), (True, 0.0), (True, 5.0)):
        config = with_losses(model_type, wanted=wanted, weight=weight)
        origin = TransformersModel(Source(config.model_type, fields=config.to_json_string(use_diff=False)))
        with torch.device("cpu" if model_type in ("dbrx", "jetmoe") else "meta"):  # whose experts depend on values
            model = origin.build()
        found = ""
        try:
            origin.check_probe(model, probe(model, origin))
        except ConfigError as error:
            found = error.what
        is_added = abs(added(config)) > 1e-4
        assert ("adds a loss with" in found) is is_added, (wanted, weight, found)


@pytest.mark.slow
def test_the_fix_works(tmp_path: Path) -> None:
    made = {"model_type": "qwen3_moe", "weights": False, "tokenizer": False}
    folder = write_model(tmp_path / "moe", output_router_logits=True, **made)
    with pytest.raises(ConfigError, match="adds a loss with router_aux_loss_coef = 0.001") as found:
        hf_config(str(folder))
    assert found.value.fix == f'"output_router_logits": false in {folder}/config.json'
    changed = write_model(tmp_path / "off", **made)
    change_config(changed, output_router_logits=False)
    hf_config(str(changed))
