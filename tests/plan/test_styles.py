"""Collectives implied by styles for any form of their paths, and paths that match no matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.rules import violations
from meshwright.config.schema import run_type
from meshwright.errors import LayoutError
from meshwright.models.contract.model_facts import ParameterFacts
from meshwright.models.contract.tp_styles import COLUMN, DIVIDED, ROW, STREAM, gather
from meshwright.plan.make_plan import make_plan
from meshwright.plan.verify import faults
from tests.plan import fake_family
from tests.plan.fake_family import KIND, Fake, fake_plan
from tests.plan.plans import fake


@pytest.fixture
def styled(monkeypatch):
    """The plan of the fake family with other styles of its blocks."""

    def made(styles, **mesh):
        monkeypatch.setattr(fake_family, "STYLES", {**fake_family.STYLES, "block": styles})
        make_plan.__globals__["_make_plan"].cache_clear()
        return fake_plan(**mesh)

    yield made
    make_plan.__globals__["_make_plan"].cache_clear()


BLOCK = {"norm": STREAM, "router": STREAM, "attention": gather(), "attention.wq": COLUMN, "attention.q_norm": DIVIDED}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_glob_moves_what_its_modules_do(styled, sequence_parallel):
    mesh = {"tp": 2, "sequence_parallel": sequence_parallel}
    found = styled({**BLOCK, "*.wo": ROW}, **mesh)
    assert found.kind("block").collectives == fake(**mesh).kind("block").collectives and faults(found) == []


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_column_by_itself_gathers(styled, sequence_parallel):
    mesh = {"tp": 2, "sequence_parallel": sequence_parallel}
    alone = {path: style for path, style in BLOCK.items() if path != "attention"} | {"attention.wo": ROW}
    found = styled(alone, **mesh)
    assert found.kind("block").collectives == fake(**mesh).kind("block").collectives and faults(found) == []


@pytest.mark.parametrize(
    ("styles", "said"),
    [({**BLOCK, "attention.w_o": ROW}, "attention.w_o"), ({"norm": gather()}, "no column-parallel layer inside")],
)
def test_a_path_without_a_matrix_is_refused(styled, styles, said):
    with pytest.raises(LayoutError) as caught:
        styled(styles, tp=2)
    assert said in caught.value.what and caught.value.where.startswith("Family.styles, block") and caught.value.fix


def test_a_misspelt_norm_of_heads_is_a_fault(styled):
    found = styled({**BLOCK, "attention.wo": ROW, "attention.qnorm": DIVIDED}, tp=2)
    assert any("divided of attention.qnorm matches no parameter" in str(fault) for fault in faults(found))


class Changed(Fake):
    """The fake family with other parameters."""

    parameters: tuple[ParameterFacts, ...] = ()

    def describe(self, f):
        facts = super().describe(f)
        (block,) = facts.kinds
        return replace(facts, kinds=(replace(block, parameters=(*block.parameters, *self.parameters)),))


class Beside(Changed):
    """A parameter of the block itself."""

    parameters = (ParameterFacts("gamma", (8,)),)


class Tied(Changed):
    """A block that is tied to an end."""

    parameters = (ParameterFacts("other.weight", (32, 8), tied_to="embed.weight"),)


@pytest.mark.parametrize(
    ("family", "tp", "said"),
    [("Beside", 2, "block/gamma belongs to a module with submodules"), ("Beside", 1, None),
     ("Tied", 1, "block/other.weight is tied to embed.weight"), ("Fake", 2, None)],
)  # fmt: skip
def test_descriptions_that_no_layout_can_follow(family, tp, said):
    module = KIND.partition(":")[0] if family == "Fake" else __name__
    kind = f"{module}:{family}"
    config = run_type(kind).model_validate({"model": {"kind": kind}, "mesh": {"tp": tp}})
    found = [one for one in violations(config, None) if "block/" in one.what]
    assert bool(found) is bool(said)
    assert not said or (found[0].what.startswith(said) and found[0].rule and (found[0].fixes or found[0].otherwise))
