"""Quantised folders: values are those of a plain loop over blocks, or the folder is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.models.contract.task import SimpleBatch
from meshwright.models.hf import private
from meshwright.models.hf.family import FAMILY, pretrained
from meshwright.models.hf.pretrained import Pretrained, dequantised
from meshwright.prove.record.reference_run import build_reference
from meshwright.prove.spec import as_proof
from tests.helpers import open_data
from tests.models.hf.folders import change_config, open_folder, write_model
from tests.models.hf.runs import hf_config, hf_facts

pytest.importorskip("transformers")

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 8]}
PLAIN = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def by_blocks(weight: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """Each block times its scale, one after the other."""
    out = torch.empty(weight.shape)
    for i, row in enumerate(scale):
        for j, one in enumerate(row):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            out[block] = weight[block].float() * one
    return out


@pytest.mark.parametrize(
    ("quantization", "shape", "blocks"),
    [(FP8, (3, 3), (16, 8)), (PLAIN, (40, 1), (1, 99)), (PLAIN, (1, 1), (99, 99)), (FP8, (40, 3), (1, 8))],
    ids=["blocks, the last smaller", "rows", "one", "rows of blocks"],
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_multiplied(
    quantization: dict[str, Any], shape: tuple[int, int], blocks: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, scale = torch.randn(40, 20).to(dtype), torch.rand(shape) + 0.1
    others = {"norm.weight": torch.ones(3), "x.k_scale": torch.ones(1)}
    for name in ("x.weight_scale_inv", "x.weight_scale", "x.scale"):
        found = dequantised({"x.weight": weight, name: scale, **others}, quantization, where="f")
        assert torch.equal(found["x.weight"], by_blocks(weight, scale, *blocks))
        assert found.keys() == {"x.weight", *others} and found["norm.weight"] is others["norm.weight"]
    stacked = {"x.weight": weight[None].repeat(2, 1, 1), "x.weight_scale_inv": torch.stack([scale, 2 * scale])}
    second = dequantised(stacked, quantization, where="f")["x.weight"][1]
    assert torch.equal(second, by_blocks(weight, 2 * scale, *blocks))


@pytest.mark.parametrize(
    "scale",
    [torch.ones(2, 3), torch.ones(3), torch.ones(1, 1), torch.ones(3, 3, dtype=torch.uint8), torch.ones(4, 3)],
    ids=lambda scale: f"{list(scale.shape)} {scale.dtype}",
)
def test_scales_that_do_not_fit_are_refused(scale: Tensor) -> None:
    weight = torch.randn(40, 20).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"the scale of x\.weight, \[40, 20\], is"):
        dequantised({"x.weight": weight, "x.weight_scale_inv": scale}, FP8, where="f")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "torchao", None])
def test_other_methods_are_refused(method: str | None) -> None:
    with pytest.raises(CheckpointError, match=f"method {method}") as caught:
        dequantised({}, {"quant_method": method, "bits": 4}, where="f")
    assert "model.weights=random" in caught.value.fix


def quantise(folder: Path, which: str = "_proj") -> dict[str, Tensor]:
    """Store a folder's matrices of some name as float8 in blocks, and return what all tensors stand for."""
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if which in name]:
        rows, columns = tensors[name].shape
        scale = torch.rand(-(-rows // 16), -(-columns // 8)) / 2000 + 1e-4
        spread = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(8, 1)[:, :columns]
        tensors[name] = (tensors[name] / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        plain[name] = by_blocks(tensors[name], scale, 16, 8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=FP8)
    return plain


def test_a_folder_in_float8_is_the_model_that_it_stands_for(tmp_path: Path) -> None:
    """Its logits are those of transformers with the products; its scales are never read without, nor left out."""
    folder = write_model(tmp_path / "model", "llama", tokenizer=False, hidden_size=56, num_attention_heads=4)
    plain = quantise(folder)
    run = as_proof(hf_config(str(folder), "model.weights=folder"))
    open_data(run)
    write_model(tmp_path / "plain", "llama", tokenizer=False, hidden_size=56, num_attention_heads=4)
    save_file(plain, tmp_path / "plain/model.safetensors", metadata={"format": "pt"})
    tokens = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = run.family.run(build_reference(run), tokens, SimpleBatch(tokens))
        assert (own - open_folder(tmp_path / "plain")(tokens).logits).abs().max() < 1e-6
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    cases: Mapping[str, tuple[dict[str, Tensor], Any]] = {
        f"{name} is stored as float8_e4m3fn, and has no scale": (
            {key: tensor for key, tensor in tensors.items() if key != f"{name}_scale_inv"}, FP8,
        ),
        "stored as float8_e4m3fn, and config.json has no quantization_config": (tensors, None),
        f"{name}_scale_inv belongs to quantised weights, but": (
            {**plain, f"{name}_scale_inv": tensors[f"{name}_scale_inv"]}, None,
        ),
        "no place for model.layers.0.mlp.down_proj.input_scale": (
            {**tensors, name.replace("weight", "input_scale"): torch.ones(1)}, FP8,
        ),
    }  # fmt: skip
    for number, (message, (changed, quantization)) in enumerate(cases.items()):
        other = tmp_path / f"model-{number}"
        write_model(other, "llama", tokenizer=False, weights=False, hidden_size=56, num_attention_heads=4)
        change_config(other, quantization_config=quantization)
        save_file(changed, other / "model.safetensors")
        with pytest.raises(CheckpointError, match=message.replace(".", r"\.")):
            open_weights(other, tmp_path).check()


def open_weights(folder: Path, here: Path) -> Pretrained:
    """The weights that a run of a folder starts from."""
    found = pretrained(hf_facts(str(folder), "model.weights=folder"))
    assert found is not None
    return found


@pytest.mark.slow
def test_experts_in_float8_are_multiplied_before_they_are_stacked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "mixtral", tokenizer=False)
    plain = quantise(folder, ".experts.")
    read = open_weights(folder, tmp_path).read("model.layers.0.mlp.experts.gate_up_proj")
    for i, expert in enumerate(read):
        w1, w3 = (plain[f"model.layers.0.block_sparse_moe.experts.{i}.{name}.weight"] for name in ("w1", "w3"))
        assert torch.equal(expert, torch.cat([w1, w3]))


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@pytest.mark.slow
def test_mxfp4_experts_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "gpt_oss", tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    due = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, out = tensors.pop(name).shape  # used as x @ weight
        blocks = torch.randint(0, 256, (experts, out, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, out, width // 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        low, high = torch.tensor(FP4)[blocks.long() % 16], torch.tensor(FP4)[blocks.long() // 16]
        values = torch.stack([low, high], -1).flatten(-2) * 2.0 ** (scales.float()[..., None] - 127)
        due[name] = values.flatten(-2).transpose(1, 2)
    assert due
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    with private.quiet():
        weights = open_weights(folder, tmp_path)
        for name, values in due.items():
            assert torch.equal(weights.read(name).float(), values), name
    facts = hf_facts(str(folder))
    model = FAMILY.identity(facts)
    assert "quantization_config" not in model["fields"], "an export has weights as they are"
