"""`api.prove` looks for the place of a fault in a second pass, whose processes it starts itself."""

from __future__ import annotations

import pytest

from meshwright import api

FAMILY = '''
import torch.distributed as dist
from meshwright.models.llama.family import LlamaConfig
from meshwright.models.llama.family import LlamaFamily


class Config(LlamaConfig):
    kind: str = "wrong_on_one_rank:Family"


class Family(LlamaFamily):
    """Llama whose first feed-forward layer goes wrong on rank 1."""

    sections = {"model": Config}

    def build(self, f, part):
        module = super().build(f, part)
        if dist.is_initialized() and dist.get_rank() == 1:
            module.blocks["0"].ffn.register_forward_hook(lambda module, args, out: 1.5 * out)
        return module
'''


@pytest.mark.slow
def test_the_place_is_found_from_outside(tmp_path, monkeypatch):
    (tmp_path / "wrong_on_one_rank.py").write_text(FAMILY)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["model.kind=wrong_on_one_rank:Family", "mesh.dp_shard=2", "train.global_batch=4", "train.seq_len=32"]
    proof = api.prove(api.load_config("llama-tiny", *words), steps=2)
    assert not proof
    text = " ".join(" ".join(proof.lines).split())
    assert "the first value that differs is the output of blocks.0.ffn, only on rank 1" in text
    assert "it is 1.500 × the right one; what blocks.0.ffn takes is right, so the fault is in it" in text
    assert proof.report["causes"][0]["kind"] == "forward"
