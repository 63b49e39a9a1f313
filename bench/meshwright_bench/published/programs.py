"""Programs that trained the published runs: their software stacks, and what in a run depends on them.

Parameters belong to a program, a device or a link, never to a run or a model. Those in `fitted.toml` were fitted
(`fit`); the others are facts of the program's source or documentation. Doesn't import torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.cluster.stacks import Stack
from meshwright_bench.published.rows import Row

FITTED = Path(__file__).with_name("fitted.toml")
ALIKE = {
    "oneflow": ("oneflow", "oneflow-hybrid"),
    "torchtitan": (
        "torchtitan", "torchtitan-eager", "torchtitan-rowwise", "torchtitan-async", "torchtitan-async-rowwise",
    ),
    "async-tp": ("torchtitan-async", "torchtitan-async-rowwise"),
    "rowwise": ("torchtitan-rowwise", "torchtitan-async-rowwise"),
}  # fmt: skip
"""Stacks that share parameters, by the name before them."""
PARTS = {("torchtitan-async-rowwise", "hidden_tensor"): 0.5}
"""What of a shared parameter a stack has. Scaled by row, casts are between gathers and products, so that of the
collectives only reduce-scatters, which are half of them, run beside products (pytorch/pytorch issue 149990)."""


@dataclass(frozen=True)
class Program:
    """A program that trains models, as far as a plan depends on it."""

    stack: Stack
    sharded: bool = True
    """Whether parameters and optimizer states are sharded over data-parallel ranks (FSDP), or replicated (DDP)."""
    reduces_whole: bool = False
    """Whether replicas sum all gradients as one tensor."""
    scatters: bool = False
    """Whether tp ranks send parts of what goes from stage to stage."""
    reduce: str = "float32"
    """Dtype of the sums of gradients."""
    reduces_each: bool = False
    """Whether gradients are reduced after every micro-batch, and not only after the last."""
    scores: bool = False
    """Whether attention keeps its scores, as before FlashAttention."""
    bias: bool = True
    """Whether a GPT has biases and dropout."""
    compiled: bool = False
    by_tensor: bool = True
    """Whether float8 is scaled by tensor, so that tensor parallelism gathers it, or by row."""
    reruns: tuple[str, ...] = ()
    """Products that selective recomputation runs again."""
    resends: tuple[str, ...] = ("all_gather",)
    """Collectives of tensor parallelism that it runs again with them."""
    state_bytes: int | None = None
    """Bytes per parameter that a rank holds at all times; None as Meshwright, which frees gradients."""
    buffers: bool = False
    """Whether pipelines keep copies of what a backward takes from its forward, as OneFlow's do."""
    counts_saved: bool = False
    """Whether a memory figure counts states and saved activations only, as a paper's own formula does."""
    live_logits: float = 1.0
    """Bytes of logits and their gradients over those that plans count: three tensors in float32."""
    reserved: float = 1.0
    """What a measurement counts over what is allocated: what PyTorch's allocator reserves."""
    context_bytes: float = 0.0
    """What a measurement by nvidia-smi counts besides: CUDA's context and libraries."""


@cache
def fitted() -> Mapping[str, float]:
    """Return the fitted parameters by path, such as `A100/memory_efficiency` or `llm-foundry/slower_beside`."""
    found: dict[str, float] = tomllib.loads(FITTED.read_text("utf-8"))["parameters"]
    return found


def with_parameters(stack: Stack, values: Mapping[str, float]) -> Stack:
    """Return a stack with those of the parameters that are its own."""
    found = ((path.partition("/"), value) for path, value in values.items())
    own: dict[str, Any] = {
        name: value * PARTS.get((stack.name, name), 1.0)
        for (owner, _, name), value in found
        if stack.name in ALIKE.get(owner, (owner,))
    }
    return replace(stack, **own)


SAC = ("attention.wk", "attention.wo", "ffn.up")
"""Every second product of a block, which torchtitan's selective recomputation runs again."""
RESENDS = ("all_gather", "reduce_scatter")
"""Those that asynchronous tensor parallelism runs again: it can't hide those whose results are kept (torchtitan pull
request 965)."""
FOUNDRY = Program(Stack("llm-foundry"), reduces_each=True, bias=False, live_logits=1 / 3)
"""FSDP1, whose trainer reduces gradients after each micro-batch; cross-entropy by one kernel, on logits in 16 bits."""
MEGATRON = Program(
    Stack("megatron", hides_reductions=False), sharded=False, reduces_whole=True, scatters=True, reduce="float16",
    scores=True, state_bytes=18,
)  # fmt: skip
"""Replicas that sum gradients once, after the last backward. Weights in 16 bits, and gradients, weights and two states
in float32 are held at all times (18 bytes: Korthikanti et al. 2022, section 6)."""
ONEFLOW = Program(
    Stack("oneflow"), sharded=False, reduce="float16", scores=True, state_bytes=18, buffers=True,
    live_logits=0.5, context_bytes=1.2e9,
)  # fmt: skip
"""Gradients are summed beside the backward; logits stay in 16 bits. Memory is nvidia-smi's: of the context by the rows
that aren't held out."""
TITAN = Program(Stack("torchtitan"), compiled=True, reruns=SAC, reserved=1.25)
"""FSDP2. Memory is what is reserved, by the rows that aren't held out."""
HYBRID = replace(ONEFLOW, stack=Stack("oneflow-hybrid", hides_reductions=False))
"""OneFlow with tensor parallelism, whose collectives then run between kernels."""


def _named(name: str, program: Program, **changes: Any) -> Program:
    return replace(program, stack=with_parameters(replace(program.stack, name=name), fitted()), **changes)


PROGRAMS = {
    name: _named(name, program, **changes)
    for name, program, changes in (
        ("llm-foundry", FOUNDRY, {}),
        ("llm-foundry-fp8", FOUNDRY, {}),
        ("megatron-2021", MEGATRON, {}),
        ("megatron-dlperf", MEGATRON, {}),
        ("megatron-2022", MEGATRON, {"counts_saved": True}),
        ("deepspeed", MEGATRON, {}),
        ("oneflow", ONEFLOW, {}),
        ("oneflow-hybrid", HYBRID, {}),
        ("torchtitan-eager", TITAN, {"compiled": False}),
        ("torchtitan", TITAN, {}),
        ("torchtitan-rowwise", TITAN, {"by_tensor": False}),
        ("torchtitan-async", TITAN, {"resends": RESENDS}),
        ("torchtitan-async-rowwise", TITAN, {"by_tensor": False, "resends": RESENDS}),
        ("maxtext", Program(Stack("maxtext", fused=True), compiled=True), {}),
    )
}


def program_of(row: Row) -> str:
    """Return the name of the program that trained a row."""
    notes, source = row.text["notes"], row.source
    if source == "LF":
        return "llm-foundry-fp8" if row.text["dtype"] == "fp8" else "llm-foundry"
    if source == "OF":
        oneflow = "oneflow-hybrid" if row.size("tp") > 1 else "oneflow"
        return "megatron-dlperf" if notes.startswith("Megatron-LM") else oneflow
    if source == "TT":
        is_async, rowwise = "-async" * ("async" in notes.lower()), "-rowwise" * ("rowwise" in notes)
        return "torchtitan-eager" if notes.startswith("eager") else f"torchtitan{is_async}{rowwise}"
    return {"NAR": "megatron-2021", "MTNLG": "deepspeed", "KOR": "megatron-2022", "MT": "maxtext"}[source]
