"""A family with the parameters that no built-in family has under sequence parallelism: biases of norms, column- and
row-parallel layers, and a norm and an activation parameter on a column-parallel output."""

from __future__ import annotations

from torch import nn

from meshwright.models.contract.family import Family
from meshwright.models.contract.model_facts import EdgeFacts, KindFacts, ModelFacts, Normal, Role, linear, vectors
from meshwright.models.contract.tp_styles import COLUMN, DIVIDED, HEAD, ROW, STREAM, VOCABULARY, gather
from meshwright.models.tasks.next_token import TextTask
from meshwright.models.tasks.text_data import open_text
from meshwright.models.tasks.text_reference import TextReference
from meshwright.nn.linear import Linear
from meshwright.settings.section import ModelSection

KIND = "tests.plan.rows_family:Rows"
DIM, HIDDEN, GROUP, VOCABULARY_SIZE = 8, 16, 4, 256


class RowsConfig(ModelSection):
    """Section with only the kind."""

    kind: str = KIND


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.group_norm, self.act = Linear(DIM, HIDDEN, bias=True), nn.RMSNorm(GROUP), nn.PReLU()
        self.fc2 = Linear(HIDDEN, DIM, bias=True)

    def forward(self, x):
        return self.fc2(self.act(self.group_norm(self.fc1(x).unflatten(-1, (-1, GROUP)))).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY_SIZE, DIM)
        self.blocks = nn.ModuleDict({str(layer): Block() for layer in part.layers})
        self.norm, self.head = nn.LayerNorm(DIM), Linear(DIM, VOCABULARY_SIZE)

    def forward(self, x, seq_len=None):
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))


class Rows(Family):
    """A stage of two blocks."""

    sections = {"model": RowsConfig}

    def describe(self, f):
        mlp = (*linear("mlp.fc1", DIM, HIDDEN, bias=True), *vectors(GROUP, "mlp.group_norm.weight"),
               *vectors(1, "mlp.act.weight"), *linear("mlp.fc2", HIDDEN, DIM, bias=True))  # fmt: skip
        block = KindFacts("block", "blocks.{layer}", (*vectors(DIM, "norm.weight", "norm.bias"), *mlp))
        tokens = KindFacts("embed", "", linear("embed", DIM, VOCABULARY_SIZE, role=Role.EMBEDDING))
        ends = (*vectors(DIM, "norm.weight", "norm.bias"), *linear("head", DIM, VOCABULARY_SIZE, role=Role.HEAD))
        return ModelFacts(
            kinds=(block,),
            layers=("block",) * 2,
            edge=EdgeFacts("stream", (f.seq_len, DIM)),
            tokens=f.seq_len,
            identity={"kind": "rows"},
            first=(tokens,),
            last=(KindFacts("head", "", ends),),
        )

    def styles(self, f):
        block = {"norm": STREAM, "mlp": gather(), "mlp.fc1": COLUMN, "mlp.group_norm": DIVIDED, "mlp.act": DIVIDED,
                 "mlp.fc2": ROW}  # fmt: skip
        return {"block": block, "embed": {"embed": VOCABULARY}, "head": {"norm": STREAM, "head": HEAD}}

    def build(self, f, part):
        return Model(part)

    def initial(self, f, name):
        return Normal(0.5)

    def open_data(self, f):
        return open_text(f, vocab_size=VOCABULARY_SIZE)

    def task(self, f, data, device):
        return TextTask(f, data, device)

    def reference(self, f, data):
        return TextReference(f, data)
