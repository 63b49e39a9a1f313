"""Proofs as run on the gang's ranks: what `meshwright prove --as-run` does, without starting processes."""

from __future__ import annotations

from meshwright.config.schema import RunConfig
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.prove.result import ProofResult
from meshwright.prove.spec import as_configured, num_steps
from tests.gangs.gang import GangPool
from tests.prove.proofs import (
    SMALL,
    SMALL_DIT,
    SMALL_EXPERTS,
    SMALL_PICTURES,
    SOURCE,
    Seed,
    few_pictures,
    on_ranks,
    prove_with,
    record_on_rank,
)

SIZES = {
    "llama-tiny": (*SMALL, f"data.source={SOURCE}"),
    "moe-tiny": (*SMALL_EXPERTS, f"data.source={SOURCE}"),
    "dit-digits": (*SMALL_DIT, *SMALL_PICTURES),
}


def as_run_config(*words: str, preset: str = "llama-tiny", precision: str = "bfloat16") -> RunConfig:
    """A small model of a preset, in bfloat16."""
    return as_configured(load(preset, [*SIZES[preset], f"train.precision={precision}", *words]))


def proof(gang: GangPool, config: RunConfig, fault: str = "", *, steps: int | None = None) -> ProofResult:
    """The proof of a configuration on a gang, with a fault where one is named."""
    seed = Seed("tests.prove.as_run.faults", "FAULTS", fault) if fault else Seed()
    steps = steps or num_steps(make_plan(config), None)
    records = on_ranks(gang, config, record_on_rank, seed, few_pictures(config), steps=steps, as_run=True)
    return prove_with(records, config, as_run=True)
