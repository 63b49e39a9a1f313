"""Programs that trained the published runs: their software stacks, and what in a run depends on them.

Parameters belong to a program or a device, never to a run or a model. Those that were fitted are in `fitted.toml`.
Doesn't import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.cluster.stacks import Stack
from meshwright_bench.published.rows import Row


@dataclass(frozen=True)
class Program:
    """A program that trains models, as far as a plan depends on it."""

    stack: Stack
    sharded: bool = True
    """Whether parameters and optimizer states are sharded over data-parallel ranks (FSDP), or replicated (DDP)."""
    reduces_whole: bool = False
    """Whether replicas sum all gradients as one tensor."""
    reduce: str = "float32"
    """Dtype of the sums of gradients."""
    reduces_each: bool = False
    """Whether gradients are reduced after every micro-batch, and not only after the last."""
    scores: bool = False
    """Whether attention keeps its scores (before FlashAttention)."""
    bias: bool = True
    compiled: bool = False
    state_bytes: int | None = None
    """Bytes per parameter that are held at all times: in Megatron, weights in 16 bits, and gradients, weights and two
    states in float32 (Korthikanti et al. 2022 count 18). None: as Meshwright, which frees gradients."""
    live_logits: float = 1.0
    """Bytes of logits and their gradients over those that plans count: three tensors in float32."""
    reserved: float = 1.0
    """Memory that was measured over what is allocated: what PyTorch's allocator reserves."""
    context_bytes: float = 0.0
    """What a measurement by nvidia-smi counts besides: CUDA's context and libraries."""
    reruns: tuple[str, ...] = ()
    """Products that selective recomputation runs again."""


SAC = ("attention.wk", "attention.wo", "ffn.up")
"""Every second product of a block, which torchtitan's selective recomputation runs again."""
TITAN = Program(Stack("torchtitan"), compiled=True, reruns=SAC, reserved=1.25)
ONEFLOW = Program(Stack("oneflow"), sharded=False, state_bytes=18, context_bytes=1.2e9, live_logits=0.5,
                  reduce="bfloat16", scores=True)  # fmt: skip
PROGRAMS = {
    "llm-foundry": Program(Stack("llm-foundry"), reduces_each=True, bias=False, live_logits=1 / 3),
    "llm-foundry-fp8": Program(Stack("llm-foundry-fp8"), reduces_each=True, bias=False, live_logits=1 / 3),
    "megatron-2021": Program(
        Stack("megatron-2021", hides_reductions=False),
        sharded=False,
        state_bytes=18,
        reduces_whole=True,
        reduce="bfloat16",
        scores=True,
    ),
    "megatron-2022": Program(
        Stack("megatron-2022", hides_reductions=False),
        sharded=False,
        state_bytes=18,
        reduces_whole=True,
        reduce="bfloat16",
        scores=True,
    ),
    "oneflow": ONEFLOW,
    # With tensor parallelism its collectives run between kernels (nccl_use_compute_stream).
    "oneflow-hybrid": replace(ONEFLOW, stack=Stack("oneflow-hybrid", hides_reductions=False)),
    "torchtitan-eager": replace(TITAN, stack=Stack("torchtitan-eager"), compiled=False),
    "torchtitan": TITAN,
    "torchtitan-rowwise": replace(TITAN, stack=Stack("torchtitan-rowwise")),
    "torchtitan-async-tp": replace(TITAN, stack=Stack("torchtitan-async-tp")),
    "torchtitan-async-tp-rowwise": replace(TITAN, stack=Stack("torchtitan-async-tp-rowwise")),
    "maxtext": Program(Stack("maxtext", fused=True), compiled=True),
}


def program_of(row: Row) -> str:
    """Return the name of the program that trained a row."""
    notes, source = row.text["notes"], row.source
    if source == "LF":
        return "llm-foundry-fp8" if row.text["dtype"] == "fp8" else "llm-foundry"
    if source == "OF":
        oneflow = "oneflow-hybrid" if row.size("tp") > 1 else "oneflow"
        return "megatron-2021" if notes.startswith("Megatron-LM") else oneflow
    if source == "TT":
        tp, rowwise = "-async-tp" * ("async" in notes.lower()), "-rowwise" * ("rowwise" in notes)
        return "torchtitan-eager" if notes.startswith("eager") else f"torchtitan{tp}{rowwise}"
    return {"NAR": "megatron-2021", "MTNLG": "megatron-2021", "KOR": "megatron-2022", "MT": "maxtext"}[source]
