"""Weights of folders whose tensors have other names or forms than the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import CheckpointError
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.models.contract.task import SimpleBatch
from meshwright.models.hf import private
from meshwright.models.hf.family import pretrained
from meshwright.models.hf.tiny_config import tiny_config
from meshwright.plan.make_plan import make_plan
from meshwright.prove.record.reference_run import build_reference
from meshwright.prove.spec import as_proof
from meshwright.train.build_job import build_job
from tests.gangs.gang import GangPool
from tests.helpers import open_data, quick_and_slow, rank_context
from tests.models.hf.folders import change_config, open_folder, write_model
from tests.models.hf.runs import hf_config, run

pytest.importorskip("transformers")


@pytest.mark.slow
def test_the_text_model_of_one_with_images(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    torch.manual_seed(0)
    with private.quiet():
        config = Gemma3Config(text_config=tiny_config("gemma3_text"), vision_config=vision, mm_tokens_per_image=4)
        Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    run = as_proof(hf_config(str(tmp_path / "model"), "model.weights=folder"))
    open_data(run)
    tokens = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(1))
    theirs = open_folder(tmp_path / "model")
    with torch.no_grad():
        own = run.family.run(build_reference(run), tokens, SimpleBatch(tokens))
        assert (own - theirs(input_ids=tokens, token_type_ids=torch.zeros_like(tokens)).logits).abs().max() < 1e-6


@pytest.mark.slow
def test_converted_weights_are_those_of_the_configuration(tmp_path: Path) -> None:
    """Experts are converted into the cache; with another configuration, what is there doesn't fit."""
    folder = write_model(tmp_path / "model", "mixtral", tokenizer=False)
    open_data(hf_config(str(folder), "model.weights=folder"))
    change_config(folder, num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"no model\.layers\.4\.input_layernorm\.weight"):
        open_data(hf_config(f"{folder}/config.json", "model.weights=folder"))


def shards(rank: int, world_size: int, config: RunConfig, stored: Path) -> tuple[int, int, list[str]]:
    """Gang body: build a rank's job, and return the bytes read, those of its shards, and shards with other values."""
    job = build_job(config, make_plan(config), rank_context(rank, world_size), CPU)
    full, found = load_file(stored), pretrained(run_facts(config))
    assert found is not None
    parameters = [pair for part in job.parts().values() for pair in part.named_parameters()]
    wrong = [name for name, p in parameters if not torch.equal(to_local(p), full[name][local_box(p).slices()].float())]
    return found.bytes_read, sum(to_local(p).numel() * full[name].element_size() for name, p in parameters), wrong


CPU = torch.device("cpu")


ROWS, COLUMNS = ("mesh.dp_shard=4", 1.1 / 4), ("mesh.tp=4", 1.5 / 4)
READERS = [(model_type, *shards) for model_type in ("llama", "mixtral") for shards in (ROWS, COLUMNS)]


@pytest.mark.parametrize(("model_type", "layout", "most"), quick_and_slow(READERS, [("llama", *ROWS)]))
def test_each_rank_reads_its_shards(gang: GangPool, tmp_path: Path, model_type: str, layout: str, most: float) -> None:
    """Of a folder in bfloat16, as it is or converted. Norms and, under tp, a small part besides are replicated."""
    fields = {"num_key_value_heads": 4, "dtype": torch.bfloat16}
    folder = write_model(tmp_path / "model", model_type, tokenizer=False, **fields)
    config = hf_config(str(folder), "model.weights=folder", layout, f"data.cache_dir={tmp_path}/cache")
    open_data(config)
    stored = next((tmp_path / "cache").glob("weights-*.safetensors"), folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in load_file(stored).values())
    for read, held, wrong in gang(4).run(shards, config, stored):
        assert not wrong and read == held
        assert read <= most * total, f"{read} of {total} bytes"


def bytes_read(rank: int, world_size: int, config: RunConfig) -> int:
    """Gang body: the bytes of weights that this process has read for a run."""
    found = pretrained(run_facts(config))
    assert found is not None
    return found.bytes_read


@pytest.mark.slow
def test_each_rank_of_a_run_reads_its_shards(gang: GangPool, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama", tokenizer=False, num_key_value_heads=4)
    config = hf_config(str(folder), "model.weights=folder", "mesh.tp=2", "train.steps=1", "train.warmup_steps=0",
                       "train.validation_samples=8", "train.sample_tokens=0")  # fmt: skip
    run(gang, config, tmp_path / "run")
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert all(total / 3 < read <= 1.25 / 2 * total for read in gang(2).run(bytes_read, config))
