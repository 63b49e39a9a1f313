"""The other side of part `train`: transformers' Llama as Trainer runs it with `bf16=True`, without Trainer's own work.

Float32 weights, autocast to bfloat16, the model's own loss, clipping to a norm of 1, fused AdamW, the loss read in each
step as Trainer does to look for NaN; `torch_compile=True` compiles the model. With Liger, its kernels are put into the
model as its documentation says. A process of its own; torch is imported when it runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright_bench.gpu.sizes import Size

if TYPE_CHECKING:
    import torch

OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True)
class Loop:
    """Arguments of an arm: the run, and the file of its result."""

    size: Size
    steps: int
    device: str
    tokens: str
    """File of token ids."""
    result: str
    compile: bool = False
    liger: bool = False

    def to_json(self) -> str:
        """Return it as an argument of this program."""
        return json.dumps(asdict(self))


def run_loop(loop: Loop) -> dict[str, Any]:
    """Train, and return losses and seconds of each step, and the peak memory allocated on a GPU."""
    import torch

    if loop.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    model = build_model(loop.size, loop.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if loop.compile else model
    losses, seconds = [], []
    for inputs_bt in batches(loop):
        begin = time.perf_counter()
        with torch.autocast(loop.device, torch.bfloat16, enabled=loop.size.precision == "bfloat16"):
            loss = forward(input_ids=inputs_bt, labels=inputs_bt).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if loop.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if loop.device == "cuda" else None
    return {"losses": losses, "seconds": seconds, "peak_bytes": peak}


def build_model(size: Size, device: str) -> Any:
    """Return transformers' Llama of a size, in training mode with float32 weights, on a device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.dim,
        intermediate_size=size.ffn_dim,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=size.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).train()


def batches(loop: Loop) -> Iterator[torch.Tensor]:
    """Yield the token ids of each step, [batch, tokens], on the device; the model shifts them to be its labels."""
    import numpy as np
    import torch

    size = loop.size
    ids = torch.from_numpy(np.load(loop.tokens).astype(np.int64)).to(loop.device)
    for step in range(loop.steps):
        start = step * size.global_batch * size.seq_len
        yield ids[start : start + size.global_batch * size.seq_len].view(size.global_batch, size.seq_len)


def main(argument: str) -> None:
    """Run the loop that the argument describes and write its result; a device that is too small is a result."""
    import torch

    values = json.loads(argument)
    loop = Loop(**{**values, "size": Size(**values["size"])})
    try:
        answer = run_loop(loop)
    except torch.OutOfMemoryError:
        answer = {OUT_OF_MEMORY: True}
    Path(loop.result).write_text(json.dumps(answer), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
