"""Proofs as run on the gang's ranks: what `meshwright prove --as-run` does, without starting processes."""

from __future__ import annotations

from meshwright.config.schema import RunConfig
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.prove.result import ProofResult
from meshwright.prove.spec import as_configured, num_steps
from tests.gangs.gang import GangPool
from tests.prove import proofs
from tests.prove.proofs import SMALL, SMALL_DIT, SMALL_EXPERTS, SMALL_PICTURES, SOURCE, Seed

SIZES = {
    "llama-tiny": (*SMALL, f"data.source={SOURCE}"),
    "moe-tiny": (*SMALL_EXPERTS, f"data.source={SOURCE}"),
    "dit-digits": (*SMALL_DIT, *SMALL_PICTURES),
}


def as_run_config(*words: str, preset: str = "llama-tiny", precision: str = "bfloat16") -> RunConfig:
    """A small model of a preset, in bfloat16, unless the words say otherwise."""
    named = [f"train.precision={precision}"] if not any("train.precision=" in word for word in words) else []
    return as_configured(load(preset, [*SIZES[preset], *named, *words]))


def proof(gang: GangPool, config: RunConfig, fault: str = "", *, steps: int | None = None) -> ProofResult:
    """The proof of a configuration on a gang, with a fault where one is named."""
    seed = Seed("tests.prove.as_run.faults", "FAULTS", fault) if fault else Seed()
    return proofs.proof(gang, config, seed, steps=steps or num_steps(make_plan(config), None), as_run=True)
