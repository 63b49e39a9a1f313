"""Plans whose attention layers contradict themselves or the mesh are refused, with the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.plan.run_plan import ContextMethod, Shard
from meshwright.plan.serialize import from_json, to_json
from meshwright.plan.verify import faults
from tests.plan.plans import LAYOUTS, assert_found, plan_of, with_kind

CP, CP_TP = "llama-tiny mesh.cp=2", "llama-tiny mesh.cp=2 mesh.tp=2"
HEADS = "llama-tiny mesh.cp=2 mesh.cp_method=heads"
PLAIN = "llama-tiny mesh.tp=2"
RIGHT = (
    CP_TP,
    HEADS,
    "llama-tiny mesh.cp=4 model.window=16 model.global_every=2 mesh.pp=2 train.num_microbatches=4",
    "llama-tiny mesh.cp=2 mesh.dp_shard=2 data.packing=documents",
    "moe-tiny mesh.cp=2 mesh.ep=2 mesh.dp_shard=2",
    "moe-tiny mesh.cp=4 mesh.ep=2",
    "llama3-405b mesh.pp=16 mesh.dp_shard=32 mesh.cp=4 mesh.tp=8 train.global_batch=512 train.num_microbatches=16",
)


def attention(**changes):
    """Change fields of the attention of llama-tiny's blocks."""

    def plant(plan):
        return with_kind(plan, "block", attention=replace(plan.kind("block").attention, **changes))

    return plant


def batch(**changes):
    return lambda plan: replace(plan, batch=replace(plan.batch, **changes))


def without_attention(plan):
    return with_kind(plan, "block", attention=None)


def whole_stream(plan):
    """Send all tokens of a sample between stages."""
    return replace(plan, edge=replace(plan.edge, shards=()))


def stream_over_tp(plan):
    return replace(plan, edge=replace(plan.edge, shards=(Shard(0, ("tp",)),)))


FAULTS = {
    "over no axis": (CP, attention(axes=(), method=None), "cp", "over nothing, not cp"),
    "over another axis": (CP_TP, attention(axes=("tp",)), "cp", "over tp, not cp"),
    "over an axis without cp": (PLAIN, attention(axes=("tp",), method=ContextMethod.RING), "tp", "tp, not nothing"),
    "no method": (CP, attention(method=None), "cp", "attention of block has no method"),
    "a method without cp": (PLAIN, attention(method=ContextMethod.RING), None, "has the method ring"),
    "uneven heads": (HEADS, attention(num_heads=6, num_kv_heads=3), "cp", "cp = 2 does not divide 3 key/value heads"),
    "uneven heads of a tp rank": (CP_TP, attention(num_heads=6, num_kv_heads=2, method=ContextMethod.HEADS), "cp",
                                  "sharded by heads, but cp = 2 does not divide 1 key/value heads of a tp rank"),
    "uneven heads over tp": (PLAIN, attention(num_heads=3, num_kv_heads=3), "tp", "tp shards 3 heads"),
    "uneven key/value heads over tp": (PLAIN, attention(num_heads=4, num_kv_heads=1), "tp", "tp shards 1 head of"),
    "unshared heads": (PLAIN, attention(num_heads=4, num_kv_heads=3), None, "4 heads of 32 elements for 3 key/value"),
    "no heads": (CP, attention(num_kv_heads=0), None, "for 0 key/value heads"),
    "a block without attention": (CP, without_attention, "cp", "block has no attention"),
    "uneven tokens": (CP, batch(tokens=127), "cp", "cp shard samples of 127 tokens over 2 ranks"),
    "uneven tokens over tp": (CP_TP, batch(tokens=130), "cp", "cp, tp shard samples of 130 tokens over 4 ranks"),
    "documents": (PLAIN, attention(mask=MaskSpec(documents=((128,),))), None, "the mask of block has documents"),
    "a whole stream": (CP, whole_stream, "cp", "stream is not sharded over cp"),
    "a stream over tp only": (CP_TP, stream_over_tp, "cp", "stream is not sharded over cp"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(case):
    base, plant, axis, words = case
    assert_found(base, plant, None, axis, words)


@pytest.mark.parametrize("words", RIGHT)
def test_right_plans(words):
    plan = plan_of(words)
    assert faults(plan) == []
    read = from_json(to_json(plan), where="plan.json")
    assert read == plan
    layers = [kind.attention for kind in read.kinds if kind.is_block]
    assert all(layer.axes == plan.mesh.view("cp") and layer.method in tuple(ContextMethod) for layer in layers)


def test_a_block_without_attention_is_right_without_cp():
    assert faults(without_attention(plan_of(PLAIN))) == []
    assert any(word in words for words in LAYOUTS for word in ("dit-xl-2", "llama3-70b")), "verified in test_verify"
