"""Convert a configuration to the facts passed to its model family, and get the family's model description."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

from meshwright.config.schema import RunConfig
from meshwright.models.contract.family import RunFacts
from meshwright.models.contract.model_facts import ModelFacts


def run_facts(config: RunConfig) -> RunFacts:
    """Return the facts passed to a run's model family."""
    train = config.train
    return RunFacts(
        sections=config.family_sections(),
        axes=config.mesh.axes(),
        sequence_parallel=config.mesh.sequence_parallel,
        steps=train.steps,
        seq_len=train.seq_len,
        global_batch=train.global_batch,
        num_microbatches=train.num_microbatches,
        validation_samples=train.validation_samples,
        sample_tokens=train.sample_tokens,
        sample_prompt=train.sample_prompt,
        seed=train.seed,
        dropout=train.dropout,
        precision=train.precision,
        freeze=train.freeze,
        data=config.data,
        allow_empty_stages=config.pipeline.allow_empty_stages,
        ep=config.mesh.ep,
    )


def model_version(config: RunConfig) -> Hashable:
    """Return what tells apart models of equal configurations: keys of caches have it."""
    return config.family.version(run_facts(config))


def model_facts(config: RunConfig) -> ModelFacts:
    """Return the description of a run's model."""
    return _cached_model_facts(config, model_version(config))


@lru_cache(maxsize=16)
def _cached_model_facts(config: RunConfig, version: Hashable) -> ModelFacts:
    return config.family.describe(run_facts(config))
