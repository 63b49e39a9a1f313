"""What a run's family is told of it, and the model that the family describes."""

from __future__ import annotations

from functools import lru_cache

from meshwright.config.schema import RunConfig
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.models.contract.run_facts import DataFacts, RunFacts


def run_facts(config: RunConfig) -> RunFacts:
    """The part of a run that families may know."""
    train = config.train
    return RunFacts(
        sections=config.family_sections(),
        axes=config.mesh.axes(),
        sequence_parallel=config.mesh.sequence_parallel,
        seq_len=train.seq_len,
        global_batch=train.global_batch,
        validation_samples=train.validation_samples,
        sample_tokens=train.sample_tokens,
        seed=train.seed,
        precision=train.precision,
        freeze=train.freeze,
        data=DataFacts(**config.data.model_dump()),
    )


def model_facts(config: RunConfig) -> ModelFacts:
    """The model of a run."""
    return _described(config)


@lru_cache(maxsize=16)
def _described(config: RunConfig) -> ModelFacts:
    return config.family.describe(run_facts(config))
