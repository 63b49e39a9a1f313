"""A folder with one tensor removed, added, renamed, retyped or rescaled: each tensor is used as it is, or named.

What is used is compared with the stored tensors themselves, placed by a plain loop. A fault that drops, or makes up, a
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

from meshwright.errors import CheckpointError
from meshwright.models.foreign.structure import SavedTensors
from meshwright.models.hf import pretrained, private
from meshwright.models.hf.config import find_source
from meshwright.models.hf.pretrained import Pretrained
from meshwright.models.huggingface.weights import TRAINABLE

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
        "mixtral", pretrained, ("_expert_gaps", lambda names: []), W1,
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
        "qwen2, tied", pretrained, ("torch", mock.Mock(wraps=torch, equal=lambda a, b: True)), "lm_head.weight",
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
