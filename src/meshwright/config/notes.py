"""What plan, prove and run say of a configuration before they start."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.facts_for_family import run_facts
from meshwright.config.optimizer.lr_schedule import warmup_notes
from meshwright.config.rules_compression import no_effect_notes
from meshwright.config.schema import RunConfig


def notes_of(config: RunConfig) -> Iterator[str]:
    """Yield where the model's weights come from, what of it is set aside, and settings that have no effect."""
    yield from config.family.notes(run_facts(config))
    yield from no_effect_notes(config)
    yield from warmup_notes(config.train)
