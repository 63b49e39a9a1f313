"""A family that exercises all rules of partial gradients: norms on sharded heads, a row-parallel layer with bias, and a
router with a token counter and an auxiliary loss. It is described, but never built."""

from __future__ import annotations

from meshwright.config.schema import run_type
from meshwright.models.contract.family import Family
from meshwright.models.contract.model_facts import (
    AttentionFacts,
    AuxiliaryLoss,
    BufferFacts,
    EdgeFacts,
    KindFacts,
    ModelFacts,
    ParameterFacts,
    Role,
    Saved,
)
from meshwright.models.contract.tp_styles import COLUMN, DIVIDED, HEAD, ROW, STREAM, VOCABULARY, gather
from meshwright.nn.attention.mask_spec import MaskSpec
from meshwright.plan.make_plan import make_plan
from meshwright.settings.section import ModelSection

KIND = "tests.plan.fake_family:Fake"
DIM = 8
STYLES = {
    "block": {
        "norm": STREAM,
        "router": STREAM,
        "attention": gather(),
        "attention.wq": COLUMN,
        "attention.q_norm": DIVIDED,
        "attention.wo": ROW,
    },
    "embed": {"embed": VOCABULARY},
    "head": {"head": HEAD},
}


class FakeConfig(ModelSection):
    """Section with only the kind."""

    kind: str = KIND


class Fake(Family):
    """Described only."""

    sections = {"model": FakeConfig}

    def describe(self, f):
        block = KindFacts(
            "block",
            "blocks.{layer}",
            (
                ParameterFacts("norm.weight", (DIM,), Role.VECTOR),
                ParameterFacts("router.weight", (4, DIM)),
                ParameterFacts("attention.wq.weight", (DIM, DIM)),
                ParameterFacts("attention.wq.bias", (DIM,), Role.VECTOR),
                ParameterFacts("attention.q_norm.weight", (2,), Role.VECTOR),
                ParameterFacts("attention.wo.weight", (DIM, DIM)),
                ParameterFacts("attention.wo.bias", (DIM,), Role.VECTOR),
            ),
            buffers=(
                BufferFacts("router.counts", (4,), "float32", updated=True),
                BufferFacts("rotary", (16, 2), "float32", saved=False),
            ),
            auxiliary=(AuxiliaryLoss("balance", 0.01, on_stream=True),),
            saved=Saved(full=DIM, stream=DIM, divided=DIM),
            attention=AttentionFacts("attention", MaskSpec(causal=True), num_heads=4, num_kv_heads=4, head_dim=2),
        )
        table = ParameterFacts("embed.weight", (32, DIM), Role.EMBEDDING)
        return ModelFacts(
            kinds=(block,),
            layers=("block",) * 4,
            edge=EdgeFacts("stream", (16, DIM)),
            tokens=16,
            identity={"kind": "fake"},
            first=(KindFacts("embed", "", (table,)),),
            last=(KindFacts("head", "", (ParameterFacts("head.weight", (32, DIM), Role.HEAD),)),),
        )

    def styles(self, f):
        return STYLES

    def build(self, f, part):
        raise NotImplementedError

    def initial(self, f, name):
        raise NotImplementedError

    def open_data(self, f):
        raise NotImplementedError

    def task(self, f, data, device):
        raise NotImplementedError

    def reference(self, f, data):
        raise NotImplementedError


def fake_plan(*, comm=None, **mesh):
    """Its plan on a mesh."""
    sections = {"model": {"kind": KIND}, "mesh": mesh, "comm": comm or {}, "train": {"num_microbatches": 2}}
    return make_plan(run_type(KIND).model_validate(sections))
