"""Memory that PyTorch allocates on a GPU: as measured on one, and as a step on the CPU holds its tensors."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.capture.predict import predict_capture
from meshwright.nn.attention.attention import attention
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.plan.cuda_memory import WORKSPACES, predict_cuda_memory
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import attention_weights, predict_memory
from meshwright.plan.rules import load
from meshwright.train.record.record_files import read_events
from meshwright.units import GIB, MIB
from meshwright_bench.byte_counters import LiveBytes
from meshwright_bench.train.cases import one_billion
from tests.helpers import meshwright, small_corpus
from tests.train.jobs import load_words, make_job

DEVICE, DATE = "NVIDIA H200, torch 2.11.0", "2026-11-26"


class Measured(NamedTuple):
    """`torch.cuda.max_memory_allocated` of a training by one process, in bfloat16, on this device and date.

    Of the models of 1.5 B parameters only the sizes are on record; that the weights are kept between forward and
    backward, as in `bench train`, is inferred: without, the largest would be 2.3 GiB less, as much as these weights
    take, and 3.8 % under what was measured.
    """

    num_bytes: float
    words: tuple[str, ...]


LARGE = ("model.vocab_size=128256", "train.global_batch=4", "train.seq_len=4096", "train.loss_chunk=0")
MEASURED = {
    # bench/results/train-cuda.json
    "1.1 B, eager": Measured(46.153e9, ("train.compile=false", "train.loss_chunk=0")),
    "1.1 B, compiled": Measured(41.857e9, ("train.loss_chunk=0",)),
    "1.5 B, compiled": Measured(61.8 * GIB, LARGE),
    "1.5 B, compiled, float8 with torchao's layers": Measured(56.8 * GIB, (*LARGE, "float8.recipe=current")),
}


KEYS = {
    "model": ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size"),
    "train": ("global_batch", "seq_len", "precision", "compile"),
    "mesh": ("reshard_after_forward",),
}


def joined(*words):
    """Words of which a later one replaces an earlier one of the same key."""
    return [f"{key}={value}" for key, value in dict(word.split("=") for word in words).items()]


def plan_of_large(words):
    """The plan of `bench train` on CUDA, compiled, but for these words."""
    config = one_billion(compile=True)
    base = (f"{section}.{key}={getattr(getattr(config, section), key)}" for section in KEYS for key in KEYS[section])
    return make_plan(load(None, joined(*(word.lower() for word in base), *words)))


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_on_a_gpu_is_predicted_within_a_twentieth(name):
    measured = MEASURED[name]
    assert predict_cuda_memory(plan_of_large(measured.words)).total() == pytest.approx(measured.num_bytes, rel=0.05)


@pytest.mark.parametrize("name", MEASURED)
def test_the_sum_of_all_types_as_on_a_cpu_is_not_what_was_measured(name):
    measured = MEASURED[name]
    assert predict_memory(plan_of_large(measured.words)).total() > 1.06 * measured.num_bytes


class FusedNorm(torch.autograd.Function):
    """RMS norm that saves its input and root mean squares, as CUDA's kernel does."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rms)
        return (x * rms).mul_(weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, rms = ctx.saved_tensors
        of_weight = (gradient * x).mul_(rms).flatten(0, -2).sum(0)
        scaled = gradient * weight
        inner = (scaled * x).mean(-1, keepdim=True) * rms.square()
        return scaled.addcmul_(x, inner, value=-1).mul_(rms), of_weight, None


FULL = "recompute.policy=full"
STEPS = [
    ("in the loss", ["model.vocab_size=8192"]),
    ("in the last block", []),
    ("in the last block, by chunks", ["model.vocab_size=8192", "train.loss_chunk=64"]),
    ("in the first block", ["train.seq_len=16"]),
    ("recomputed", [FULL]),
    ("accumulated", ["train.num_microbatches=2"]),
]


@pytest.mark.parametrize(("moment", "words"), STEPS, ids=[moment for moment, _ in STEPS])
def test_a_step_holds_what_is_predicted(monkeypatch, corpus, moment, words):
    """Tensors of operators on the CPU, with norms as on CUDA; kernels' own temporary memory is not seen."""
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight, self.eps))
    base = ["model.num_layers=4", "model.num_kv_heads=4", "train.seq_len=256", "train.loss_chunk=0"]
    words = joined(*base, *words)
    _, step = make_job(0, 1, [*words, *corpus])
    step(1)
    with LiveBytes() as live:
        step.accumulate(2)
    predicted = predict_cuda_memory(make_plan(load_words(words)))
    stays = predicted.parameters + predicted.optimizer
    assert predicted.total() - WORKSPACES == pytest.approx(live.peak + stays, rel=0.07)
    assert (predicted.gradients == 0) is (moment == "in the loss")


@pytest.mark.parametrize(("dtype", "kv_heads"), [("float32", 2), ("float64", 4)])
def test_attention_without_a_fused_kernel_keeps_its_weights(dtype, kv_heads):
    """PyTorch's kernels on CUDA take neither; what takes them there saves the same tensors on a CPU."""
    words = [f"train.precision={dtype}", f"model.num_kv_heads={kv_heads}", "train.seq_len=256", "train.global_batch=2"]
    plan = make_plan(load_words(words))
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    q, k, v = (
        torch.randn(2, 256, heads, 32, dtype=getattr(torch, dtype), requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    )
    with saved_tensors_hooks(pack, lambda tensor: tensor), sdpa_kernel(SDPBackend.MATH):
        attention(q, k, v, mask=MaskSpec(causal=True))
    plain = 3 * q.nbytes  # scaled queries, and keys and values of all heads
    assert 2 * attention_weights(plan, plan.kind("block")) == pytest.approx(sum(kept.values()) - plain, rel=0.1)


@pytest.mark.parametrize("words", [["train.precision=bfloat16"], ["model.num_kv_heads=4"], ["model.window=16"]])
def test_attention_with_a_fused_kernel_keeps_none(words):
    plan = make_plan(load_words(words))
    assert all(attention_weights(plan, kind) == 0 for kind in plan.kinds)


def test_graphs_add_static_tensors_once_and_the_workspaces_of_their_stream():
    """Inputs are static tensors, which layers save: activations count them already."""
    plan = make_plan(load("llama-tiny", ["train.precision=bfloat16"]))
    found, stream = predict_capture(plan), 16 * 128 * 128 * 2
    assert found.inputs == 4 * stream and WORKSPACES == 64 * MIB
    assert found.added() == found.static - 4 * stream + found.weights + WORKSPACES


def test_no_gpu_keeps_gathered_weights_that_a_forward_frees():
    kept, freed = (
        predict_cuda_memory(plan_of_large([*LARGE, f"mesh.reshard_after_forward={word}"])) for word in ("false", "true")
    )
    assert kept.gathered - freed.gathered == 2 * (1498482688 - 128256 * 2048 - 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [[], ["train.compile=true"], ["capture.scope=layer"]])
def test_a_run_on_a_gpu_allocates_what_is_predicted(tmp_path, more):
    sizes = ["num_layers=12", "dim=1024", "num_heads=16", "num_kv_heads=4", "ffn_dim=4096"]
    words = [*(f"model.{word}" for word in sizes), "train.seq_len=512", "train.global_batch=4", *small_corpus(tmp_path)]
    words += ["train.device=cuda", "train.precision=bfloat16", "train.steps=4", "checkpoint.at_end=false", *more]
    words += ["train.validation_samples=0", "train.sample_tokens=0"]
    done = meshwright("run", "llama-tiny", *words, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    by_name = {event["event"]: event for event in read_events(tmp_path / "run")}
    peak = by_name["measured"]["memory"][0]["peak"]
    assert by_name["start"]["predicted_bytes"] == pytest.approx(peak, rel=0.05)
