"""What a proof is asked. Torch-free: the launcher makes it."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.comm.compression.catalogue import is_lossy
from meshwright.config.rules_compression import lossless_value, lossy_keys
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.pipeline.schedule_table import Schedule
from meshwright.plan.run_plan import RunPlan
from meshwright.settings.violation import format_fix


@dataclass(frozen=True)
class ProofSpec:
    """What is proved, and where its parts meet."""

    config: RunConfig
    plan: RunPlan
    num_steps: int
    folder: Path
    """Ranks leave their records here, the comparison its result."""

    def record(self, rank: int) -> Path:
        """The file of a rank's record."""
        return self.folder / f"rank-{rank}.pt"

    @property
    def result(self) -> Path:
        """The file of the result, as JSON: `report`, the interface, and `lines`, what a person reads."""
        return self.folder / "result.json"


def as_proof(config: RunConfig) -> RunConfig:
    """The run as it is proved: float64, on the CPU, everything else as given.

    But for what the family sets: behind gates that start at zero nearly all gradients of the first step are zero, and a
    proof of zeros proves nothing.

    Raises:
        ConfigError: gradients or weights lose digits between ranks.
    """
    _refuse_lossy(lossy_keys(config))
    train = {"train.precision": "float64", "train.device": "cpu", "train.compile": False}
    return config.with_keys({**train, **config.family.proof})


def plan_in_float64(plan: RunPlan) -> RunPlan:
    """A plan as it is proved: every float is float64, and nothing is compiled.

    Raises:
        ConfigError: gradients or weights lose digits between ranks.
    """
    units = [unit for stage in plan.stages for unit in plan.units(stage)]
    lossy = [f"comm.{use}" for use in ("gradients", "weights") if any(is_lossy(getattr(u, use)) for u in units)]
    _refuse_lossy(lossy)
    found: RunPlan = _in_float64(plan)
    return replace(found, kinds=tuple(replace(kind, compiled=False) for kind in found.kinds))


def _in_float64(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type | Schedule):
        return replace(value, **{field.name: _in_float64(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple):
        return tuple(_in_float64(one) for one in value)
    return "float64" if value in ("float32", "bfloat16") else value


def _refuse_lossy(lossy: list[str]) -> None:
    if lossy:
        raise ConfigError(
            f"a proof with {' and '.join(lossy)} that lose digits on the way",
            where=", ".join(lossy),
            rule="a layout is proved to compute what one device does; exact-via-all-to-all goes the way of compressed "
            "gradients, without loss",
            fix=format_fix({key: lossless_value(key) for key in lossy}),
        )
