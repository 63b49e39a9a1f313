"""Run the blocks of a pipeline rank in the order of its row, on inputs and gradients that stay the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.capture.run.capture import BackendKind, CaptureSession, Chunk
from meshwright.capture.run.scopes import select
from meshwright.config.facts_for_family import run_facts
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import Part
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import RotaryEmbedding
from meshwright.nn.transformer_block import TokenContext, token_contexts
from meshwright.pipeline import generate, lower
from meshwright.pipeline.actions import COMPUTE, ActionKind
from meshwright.plan.rules import load
from meshwright_bench.capture.cases import CaptureCase

HEAD_DIM = 64


class RankOrder:
    """Blocks of rank 0 of a 1F1B pipeline."""

    def __init__(self, case: CaptureCase, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, case.dtype)
        self.blocks = _blocks(case).to_empty(device=device)
        for parameter in self.blocks.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
        self.contexts = _contexts(case, self.blocks, device, dtype)
        shape = (case.samples, case.seq_len, case.dim)
        self.x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        self._gradient = torch.randn(shape, device=device, dtype=dtype)
        self.schedule = lower(generate("1f1b", num_stages=case.stages, num_microbatches=case.microbatches))
        self._row = [part for rank, _, part in self.schedule.positions() if rank == 0 and part.kind in COMPUTE]
        self.calls: list[Callable[..., Tensor]] = list(self.blocks)
        self.session: CaptureSession | None = None
        self._microbatch = 0

    def capture(self, scope: tuple[str, ...], mode: str, *, session: type[CaptureSession] = CaptureSession) -> None:
        """Capture parts of the blocks: after the next step."""
        found = {
            f"{at}.{name}".rstrip("."): one
            for at, block in enumerate(self.blocks)
            for name, one in select(block, scope).items()
        }
        modules, scopes = {name: one for name, (one, _) in found.items()}, {n: own for n, (_, own) in found.items()}
        backend = BackendKind.CUDA if self.x.is_cuda else BackendKind.SIMULATE
        self.session = session(
            [Chunk(0, self.blocks, modules, scopes, lambda: self._microbatch)],
            self.schedule,
            rank=0,
            scopes=scope,
            backend=backend,
            mode=mode,
            strict=True,
            agree=lambda fingerprint: None,
            average=dict,
        )

    def step(self) -> None:
        """Run all micro-batches, from gradients that are None."""
        self.blocks.zero_grad(set_to_none=True)
        self.x.grad = None
        if self.session is None:
            self._run()
            return
        with self.session.step():
            self._run()

    def _run(self) -> None:
        outputs: dict[int, Tensor] = {}
        for action in self._row:
            self._microbatch = action.microbatch
            if action.kind is ActionKind.FORWARD:
                y: Tensor = self.x
                for call, context in zip(self.calls, self.contexts, strict=True):
                    y = call(y, context)
                outputs[action.microbatch] = y
            else:
                torch.autograd.backward(outputs.pop(action.microbatch), self._gradient)


def _blocks(case: CaptureCase) -> nn.ModuleList:
    """Return the blocks of the case's model, on the meta device."""
    heads = case.dim // HEAD_DIM
    words = {"num_layers": case.num_layers, "dim": case.dim, "num_heads": heads, "num_kv_heads": heads, **case.sizes}
    config = load(case.preset, [*(f"model.{key}={value}" for key, value in words.items()), *case.words()])
    part = Part(range(case.num_layers), stage=0, num_stages=1)
    module = build_part(config.family, run_facts(config), dtype=getattr(torch, case.dtype), part=part)
    return nn.ModuleList(module.get_submodule("blocks").children())


def _contexts(case: CaptureCase, blocks: nn.ModuleList, device: torch.device, dtype: torch.dtype) -> list[TokenContext]:
    rotary = RotaryEmbedding(HEAD_DIM, 10_000.0, None)
    return token_contexts(blocks, TokenLayout(case.seq_len), rotary=rotary, device=device, dtype=dtype)
