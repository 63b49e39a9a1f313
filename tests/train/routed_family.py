"""A family with routers: each block sends every token to one of its experts and counts them; blocks differ in their
number of experts. Other step buffers count tokens, as integers and as floating-point numbers."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.models.contract.family import Family
from meshwright.models.contract.model_facts import (
    ZEROS,
    BufferFacts,
    EdgeFacts,
    KindFacts,
    ModelFacts,
    Normal,
    Role,
    linear,
)
from meshwright.models.contract.tp_styles import HEAD, STREAM, VOCABULARY
from meshwright.models.tasks.next_token import TextTask
from meshwright.models.tasks.text_data import open_text
from meshwright.models.tasks.text_reference import TextReference
from meshwright.nn.linear import Linear
from meshwright.nn.step_handles import LoadCounter, StepBuffer
from meshwright.settings.section import ModelSection

KIND = "tests.train.routed_family:Routed"
DIM, VOCABULARY_SIZE = 8, 256
NUM_EXPERTS = (4, 6, None, 8)
"""By layer; None without a router."""


class RoutedConfig(ModelSection):
    """Section with only the kind."""

    kind: str = KIND


def local(x):
    """This rank's tokens."""
    return x.to_local() if isinstance(x, DTensor) else x


class Router(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.gates = Linear(DIM, num_experts)
        self.load = LoadCounter(num_experts)
        self.gate_sums = StepBuffer((num_experts,), torch.float32)

    def forward(self, x):
        gates = local(self.gates(x)).softmax(-1)
        self.load.add(gates.argmax(-1).flatten().bincount(minlength=gates.shape[-1]))
        self.gate_sums.add(gates.detach().sum((0, 1)))
        return x * gates.amax(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.out = Linear(DIM, DIM)
        if num_experts is not None:
            self.router = Router(num_experts)

    def forward(self, x):
        y = local(self.out(x))
        return x + (self.router(y) if hasattr(self, "router") else y)


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part
        if part.is_first:
            self.embed = nn.Embedding(VOCABULARY_SIZE, DIM)
            self.seen = StepBuffer((VOCABULARY_SIZE,), torch.int64)
        self.blocks = nn.ModuleDict({str(layer): Block(NUM_EXPERTS[layer]) for layer in part.layers})
        if part.is_last:
            self.head = Linear(DIM, VOCABULARY_SIZE)

    def forward(self, x, seq_len=None):
        if self.part.is_first:
            self.seen.add(torch.bincount(x.flatten(), minlength=VOCABULARY_SIZE))
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.part.is_last else x


def block_facts(num_experts):
    """A kind of block."""
    out = linear("out", DIM, DIM)
    if num_experts is None:
        return KindFacts("dense", "blocks.{layer}", out)
    buffers = (
        BufferFacts("router.load.value", (num_experts,), "int64", updated=True, load=True),
        BufferFacts("router.gate_sums.value", (num_experts,), "float32", updated=True),
    )
    parameters = (*out, *linear("router.gates", DIM, num_experts))
    return KindFacts(f"block{num_experts}", "blocks.{layer}", parameters, buffers)


class Routed(Family):
    """Four blocks, three of which have a router."""

    sections = {"model": RoutedConfig}

    def describe(self, f):
        kinds = tuple(block_facts(number) for number in NUM_EXPERTS)
        seen = BufferFacts("seen.value", (VOCABULARY_SIZE,), "int64", updated=True)
        tokens = linear("embed", DIM, VOCABULARY_SIZE, role=Role.EMBEDDING)
        return ModelFacts(
            kinds=kinds,
            layers=tuple(kind.name for kind in kinds),
            edge=EdgeFacts("stream", (f.seq_len, DIM)),
            tokens=f.seq_len,
            identity={"kind": "routed"},
            first=(KindFacts("embed", "", tokens, (seen,)),),
            last=(KindFacts("head", "", linear("head", DIM, VOCABULARY_SIZE, role=Role.HEAD)),),
        )

    def styles(self, f):
        routed = {"out": STREAM, "router.gates": STREAM, "router.load": STREAM, "router.gate_sums": STREAM}
        blocks = {f"block{number}": routed for number in NUM_EXPERTS if number is not None}
        return {**blocks, "dense": {"out": STREAM}, "embed": {"embed": VOCABULARY}, "head": {"head": HEAD}}

    def build(self, f, part):
        return Model(part)

    def initial(self, f, name):
        return ZEROS if name.endswith(".value") else Normal(0.5)

    def open_data(self, f):
        return open_text(f, vocab_size=VOCABULARY_SIZE)

    def task(self, f, data, device):
        return TextTask(f, data, device)

    def reference(self, f, data):
        return TextReference(f, data)
