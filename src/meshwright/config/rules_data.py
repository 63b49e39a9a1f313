"""Rules for mixtures and conversations. Whether a source exists is checked when a run starts: a plan needs none."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import DataConfig, RunConfig
from meshwright.data.mixtures.entries import KEY, parse_mixture
from meshwright.errors import ConfigError
from meshwright.settings.violation import Violation, format_value

SOURCE, TEXT, CHAT, PACKING = "data.source", "data.text_field", "data.chat_field", "data.packing"
DEFAULT_SOURCE: str = DataConfig.model_fields["source"].default


def data_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield what is wrong with conversations, and with a mixture: malformed entries, or a source beside it."""
    data = config.data
    if CHAT not in model_facts(config).unread:
        yield from _chat_violations(data)
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


def _chat_violations(data: DataConfig) -> Iterator[Violation]:
    if data.chat_field is None:
        return
    if data.text_field is not None:
        yield Violation(
            ConfigError,
            f"{TEXT} = {data.text_field} and {CHAT} = {data.chat_field} are both set",
            CHAT,
            "a record is one document: a text or a conversation",
            [{TEXT: None}, {CHAT: None}],
            otherwise=f"the field of texts in their entry of {KEY}, as in '0.5:web/*.jsonl#{data.text_field}'",
        )
    if data.packing != "documents":
        yield Violation(
            ConfigError,
            f"{CHAT} = {data.chat_field}, but {PACKING} = {data.packing}",
            PACKING,
            "conversations are packed whole, so that none of them sees another",
            [{PACKING: "documents"}],
        )
