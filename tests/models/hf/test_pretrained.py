"""Weights of folders whose tensors have other names, forms or number formats than the model's.

In a folder with one tensor removed, added, renamed, retyped or rescaled, each tensor is used as it is, or named: what
is used is compared with the stored tensors themselves, placed by a plain loop. A fault that drops, or makes up, a
tensor is found.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import CheckpointError
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.models.contract.task import SimpleBatch
from meshwright.models.foreign.structure import SavedTensors
from meshwright.models.hf import pretrained as pretrained_module
from meshwright.models.hf import private
from meshwright.models.hf.config import find_source
from meshwright.models.hf.family import FAMILY, pretrained
from meshwright.models.hf.pretrained import Pretrained, dequantised
from meshwright.models.hf.tiny_config import tiny_config
from meshwright.models.hf_format.weights import TRAINABLE
from meshwright.plan.make_plan import make_plan
from meshwright.prove.record.reference_run import build_reference
from meshwright.prove.spec import as_proof
from meshwright.train.build_job import build_job
from tests.gangs.gang import GangPool
from tests.helpers import open_data, quick_and_slow, rank_context
from tests.models.hf.folders import change_config, open_folder, write_model
from tests.models.hf.runs import hf_config, hf_facts, run

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
EXPERTS = ("mesh.dp_shard=4 mesh.ep=4", 1.1 / 4)
READERS = [(model_type, *shards) for model_type in ("llama", "mixtral") for shards in (ROWS, COLUMNS)]
READERS.append(("mixtral", *EXPERTS))


@pytest.mark.parametrize(("model_type", "layout", "most"), quick_and_slow(READERS, [("llama", *ROWS)]))
def test_each_rank_reads_its_shards(gang: GangPool, tmp_path: Path, model_type: str, layout: str, most: float) -> None:
    """Of a folder in bfloat16, as it is or converted. Norms and, under tp, a small part besides are replicated."""
    fields = {"num_key_value_heads": 4, "dtype": torch.bfloat16}
    folder = write_model(tmp_path / "model", model_type, tokenizer=False, **fields)
    config = hf_config(str(folder), "model.weights=folder", *layout.split(), f"data.cache_dir={tmp_path}/cache")
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


transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2, tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=1),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32)
ADDED = ("model.layers.0.self_attn.o_proj.bias", "model.layers.2.input_layernorm.weight", "lm_head.weight", "adapter",
         "model.layers.0.block_sparse_moe.experts.3.w1.weight", "norm.weight", "q_proj.lora_A.weight")  # fmt: skip
SUFFIXES = ("_scale", "_scale_inv", ".scales", ".absmax")
EXPERT = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d)\.(w\d)\.weight")

Tensors = dict[str, Tensor]


class Folder:
    """A model's tensors as they are stored, and what a model of its configuration needs."""

    def __init__(self, path: Path, config: Any) -> None:
        with private.quiet():
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.save_pretrained(path)
        self.config = (path / "config.json").read_text("utf-8")
        self.tensors: Tensors = load_file(path / "model.safetensors")
        self.parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
        first = {id(p): name for name, p in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self.ties = {name: first[id(p)] for name, p in every if name not in self.parameters}

    def open(self, path: Path, tensors: Tensors, *unused: str) -> Pretrained:
        """Write these tensors in place of the folder's, and open them."""
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(self.config, "utf-8")
        save_file(tensors, path / "model.safetensors")
        wanted = SavedTensors(self.parameters, frozenset(), self.ties)
        return Pretrained(path, find_source(str(path)), wanted, unused, str(path / "cache"))

    def places(self, name: str) -> tuple[str, Any]:
        """The parameter that a stored tensor belongs to, and where in it."""
        if not (found := EXPERT.fullmatch(name)):
            name = self.ties.get(name, name).replace(".block_sparse_moe.gate", ".mlp.gate")
            # transformers accepts the base model's names, too
            return name if name in self.parameters else f"model.{name}", slice(None)
        layer, expert, matrix = found[1], int(found[2]), found[3]
        half = {"w1": slice(0, 12), "w3": slice(12, 24), "w2": slice(None)}[matrix]
        return f"{layer}.mlp.experts.{'down_proj' if matrix == 'w2' else 'gate_up_proj'}", (expert, half)

    def wrong(self, read: Tensors, stored: Tensors) -> list[str]:
        """Stored tensors that aren't in the parameters as they are, and numbers of parameters that aren't stored."""
        found, left = [], {name: torch.ones(shape) for name, shape in self.parameters.items()}
        for name, tensor in stored.items():
            parameter, where = self.places(name)
            lost = parameter not in read or (where != slice(None) and where[0] >= len(read[parameter]))
            if (
                lost
                or tensor.dtype not in TRAINABLE
                or not torch.equal(read[parameter][where].double(), tensor.double())
            ):
                found.append(name)
            else:
                left[parameter][where] = 0
        return found + [name for name, ones in left.items() if ones.any()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    torch.manual_seed(0)
    here = tmp_path_factory.mktemp("folders")
    return {name: Folder(here / name, make()) for name, make in CONFIGS.items()}


class Change(NamedTuple):
    """A change of one tensor."""

    kind: str
    name: str
    other: str = ""
    dtype: torch.dtype | None = None

    def apply(self, tensors: Tensors) -> tuple[Tensors, set[str]]:
        """The changed tensors, and the names that it is about."""
        tensors, tensor = dict(tensors), tensors[self.name]
        if self.kind == "retype":
            assert self.dtype is not None
            tensors[self.name] = (tensor * (1 if self.dtype.is_floating_point else 50)).to(self.dtype)
            return tensors, {self.name}
        if self.kind == "rescale":
            return {**tensors, self.other: torch.full((1, 1), 0.5)}, {self.other}
        if self.kind in ("remove", "rename"):
            del tensors[self.name]
        if self.kind != "remove":
            tensors[self.other] = tensor + (self.kind == "add another")
        return tensors, {self.name, self.other} - {""}


def change(draw: st.DrawFn, folder: Folder) -> Change:
    """A random change of a folder."""
    name = draw(st.sampled_from(sorted(folder.tensors)))
    kind = draw(st.sampled_from(("remove", "add", "add another", "rename", "retype", "rescale")))
    if kind in ("remove", "retype"):
        return Change(kind, name, dtype=draw(st.sampled_from(DTYPES)))
    if kind == "rescale":
        stem = name.removesuffix(draw(st.sampled_from(("", ".weight"))))
        return Change(kind, name, stem + draw(st.sampled_from(SUFFIXES)))
    others = [one for one in ADDED if one not in folder.tensors]
    return Change(kind, name, draw(st.sampled_from([*others, f"{name}_", f"x.{name}"])))


def outcome(folder: Folder, tensors: Tensors, about: set[str]) -> list[str]:
    """What is silently wrong with these tensors; nothing if they are used, or named."""
    with tempfile.TemporaryDirectory() as here:
        try:
            weights = folder.open(Path(here) / "model", tensors)
            weights.check()
            read = {name: weights.read(name) for name in folder.parameters}
        except CheckpointError as error:
            assert error.where and error.rule and error.fix
            # A stored name, or what transformers makes of it.
            named = about | {folder.places(name)[0] for name in about}
            named |= {folder.places(one)[0] for one in folder.tensors if any(name.startswith(one) for name in about)}
            named |= {name.replace("block_sparse_moe", "mlp") for name in about}
            named |= {name.rsplit(".", 2)[0] for name in about if EXPERT.fullmatch(name)}  # the others of an expert
            return [] if any(name in error.what for name in named) else [f"{sorted(about)} not named: {error.what}"]
        return folder.wrong(read, tensors)


@pytest.mark.parametrize("kind", CONFIGS)
@given(data=st.data())
@settings(max_examples=15)
def test_each_tensor_is_used_or_named(folders: dict[str, Folder], kind: str, data: st.DataObject) -> None:
    changed, about = data.draw(st.composite(change)(folders[kind])).apply(folders[kind].tensors)
    wrong = outcome(folders[kind], changed, about)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@given(data=st.data())
@settings(max_examples=30)
def test_each_tensor_is_used_or_named_at_length(folders: dict[str, Folder], kind: str, data: st.DataObject) -> None:
    changed, about = data.draw(st.composite(change)(folders[kind])).apply(folders[kind].tensors)
    wrong = outcome(folders[kind], changed, about)
    assert not wrong


def test_what_is_stored_plainly_is_used(folders: dict[str, Folder]) -> None:
    for folder in folders.values():
        assert not outcome(folder, folder.tensors, set())


W1 = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
FAULTS: Mapping[str, tuple[str, Any, Any, str, Callable[[Tensors], Tensors]]] = {
    "experts aren't counted": (
        "mixtral", pretrained_module, ("_expert_gaps", lambda names: []), W1,
        lambda t: {name.replace(W1, W1.replace(".1.w1", ".7.w1")): one for name, one in t.items()},
    ),
    "what is made up passes": (
        "mixtral", Pretrained, ("_check_complete", lambda *a: None), "model.norm.weight",
        lambda t: {name: one for name, one in t.items() if name != "model.norm.weight"},
    ),
    "what is left passes": (
        "llama", Pretrained, ("_check_placed", lambda *a: None), "b", lambda t: {**t, "b": torch.ones(2)},
    ),
    "numbers of any kind pass": (
        "mixtral", Pretrained, ("_is_number", lambda *a: True), W1, lambda t: {**t, W1: (t[W1] * 50).to(torch.int8)},
    ),
    "a tie is believed": (
        "qwen2, tied", pretrained_module, ("torch", mock.Mock(wraps=torch, equal=lambda a, b: True)), "lm_head.weight",
        lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(folders: dict[str, Folder], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kind, where, (name, wrong), about, edit = FAULTS[fault]
    folder, tensors = folders[kind], edit(dict(folders[kind].tensors))
    assert not outcome(folder, tensors, {about})
    monkeypatch.setattr(where, name, wrong)
    assert outcome(folder, tensors, {about}), fault


def test_weights_are_left_out_knowingly(folders: dict[str, Folder], tmp_path: Path) -> None:
    """The globs of the error accept what it names, and no more than has no place."""
    folder = folders["llama"]
    biases = {f"model.layers.{i}.self_attn.{x}_proj.bias": torch.ones(8) for i in (0, 1) for x in "qo"}
    with pytest.raises(
        CheckpointError, match=r"no place for model.layers.0.self_attn.o_proj.bias and 3 more"
    ) as caught:
        folder.open(tmp_path / "a", {**folder.tensors, **biases}).check()
    found = re.search(r"model.unused_weights='(\[.*\])'", caught.value.fix)
    assert found is not None
    for unused in (json.loads(found[1]), ["*"]):
        weights = folder.open(tmp_path / "a", {**folder.tensors, **biases}, *unused)
        weights.check()
        assert not folder.wrong({name: weights.read(name) for name in folder.parameters}, folder.tensors)
    with pytest.raises(CheckpointError, match="no tensor without a place has such a name"):
        folder.open(tmp_path / "b", folder.tensors, "*.bias").check()


def test_what_transformers_ignores_is_said(
    folders: dict[str, Folder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Frequencies of folders of 2023, and files beside the weights; an adapter is refused."""
    folder = folders["llama"]
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in (0, 1)}
    weights = folder.open(tmp_path / "model", {**folder.tensors, **old})
    save_file(old, tmp_path / "model/consolidated.safetensors")
    weights.check()
    weights.check()
    assert len(caplog.messages) == 1 and "consolidated.safetensors, model.layers.0.self_attn" in caplog.messages[0]
    save_file(old, tmp_path / "model/adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"no place for adapter_model\.safetensors"):
        weights.check()


def test_converted_weights_keep_the_widest_dtype(folders: dict[str, Folder], tmp_path: Path) -> None:
    """config.json's own dtype doesn't round what is stored."""
    folder = folders["mixtral"]
    narrow = {name: t.bfloat16() if i % 2 else t for i, (name, t) in enumerate(folder.tensors.items())}
    for tensors, due in ((narrow, torch.float32), ({n: t.half() for n, t in narrow.items()}, torch.float16)):
        weights = folder.open(tmp_path / str(due), tensors)
        path = tmp_path / str(due) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
        weights = folder.open(tmp_path / str(due), tensors)
        read = {name: weights.read(name) for name in folder.parameters}
        assert {tensor.dtype for tensor in read.values()} == {due} and not folder.wrong(read, tensors)
