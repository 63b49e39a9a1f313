"""Rules for mixtures of sources. Whether a source exists is checked when a run starts: a plan needs none."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import DataConfig, RunConfig
from meshwright.data.mixtures.entries import KEY, parse_mixture
from meshwright.errors import ConfigError
from meshwright.settings.violation import Violation, format_value

SOURCE = "data.source"
DEFAULT_SOURCE: str = DataConfig.model_fields["source"].default


def data_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield what is wrong with a mixture: malformed entries, or a source beside it."""
    data = config.data
    if not data.mixture or KEY in model_facts(config).unread:
        return
    try:
        parse_mixture(data.mixture)
    except ConfigError as error:
        yield Violation(ConfigError, error.what, KEY, error.rule, [], otherwise=error.fix)
    if data.source != DEFAULT_SOURCE:
        yield Violation(
            ConfigError,
            f"{SOURCE} = {format_value(data.source)}, but {KEY} is set too",
            SOURCE,
            f"a mixture takes the place of {SOURCE}, which keeps its default then",
            [{SOURCE: DEFAULT_SOURCE}, {KEY: ()}],
            otherwise=f"'<weight>:{data.source}' as an entry of {KEY}",
        )
