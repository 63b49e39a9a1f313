"""Sources of a run's text: what `data.source`, `data.mixture` and `data.validation_source` name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.data.mixtures import entries
from meshwright.data.sources.source_text import Use
from meshwright.data.sources.text_source import has_records
from meshwright.data.text_documents import DIGITS, DIGITS_VIDEO, STDLIB
from meshwright.data.token_files import is_token_file
from meshwright.data.tokenizer import open_tokenizer
from meshwright.errors import ConfigError, DataError, InputError
from meshwright.models.contract.family import DataConfig

PRESETS = {DIGITS: "dit-digits", DIGITS_VIDEO: "dit-digits-video"}
"""Preset to suggest for each image `data.source`."""
SOURCE, VALIDATION = "data.source", "data.validation_source"
TEXT, CHAT = "data.text_field", "data.chat_field"


@dataclass(frozen=True)
class RunSource:
    """A source of a run.

    Args:
        entry: its entry of the mixture, if it has one.
    """

    key: str
    source: str
    use: Use
    text_field: str | None = None
    chat_field: str | None = None
    entry: entries.Entry | None = None

    @contextmanager
    def named(self) -> Iterator[None]:
        """Give errors the key of this source, and fixes that work there."""
        try:
            yield
        except InputError as error:
            if self.key == SOURCE:
                raise
            fix, where = error.fix, error.where.replace(SOURCE, self.key)
            where = f"{where}, {self.source}" if where == self.key else where
            if self.key == VALIDATION:
                fix = fix.replace(f"{SOURCE}=", f"{VALIDATION}=")
            if self.entry is not None:
                start = f"in {self.key}, {float(self.entry.weight):g}:"
                fix = fix.replace(f"{SOURCE}=", start).replace(f"a larger {SOURCE}", f"a larger {self.source}")
                if self.entry.text_field is not None:
                    own = f"{start}{self.source}"
                    fix = fix.replace("data.text_field=", f"{own}#").replace("remove data.text_field", own)
            raise type(error)(error.what, where=where, rule=error.rule, fix=fix) from error.__cause__


def training_sources(data: DataConfig) -> tuple[RunSource, ...]:
    """Return the sources that are trained on.

    Raises:
        ConfigError: `data.mixture` is malformed.
    """
    use = Use.SPLIT if data.validation_source is None else Use.TRAIN
    if data.mixture:
        found = entries.parse_mixture(data.mixture)
        return tuple(RunSource(entries.KEY, one.source, use, one.text_field, entry=one) for one in found)
    return (RunSource(SOURCE, data.source, use),)


def all_sources(data: DataConfig) -> tuple[RunSource, ...]:
    """Return the sources that are trained on, and the one to validate with if it is another.

    Raises:
        ConfigError: `data.mixture` is malformed.
    """
    validation = () if data.validation_source is None else (data.validation_source,)
    return (*training_sources(data), *(RunSource(VALIDATION, source, Use.VALIDATION) for source in validation))


def resolved_sources(data: DataConfig) -> tuple[RunSource, ...]:
    """Return all sources, each with the field that is its text or its conversation, if it has fields.

    Raises:
        ConfigError: `data.mixture` is malformed.
        DataError: a source has images, or `data.text_field` or `data.chat_field` applies to none of several.
    """
    sources = all_sources(data)
    for one in sources:
        _check_is_text(one)
    key, field = (CHAT, data.chat_field) if data.chat_field is not None else (TEXT, data.text_field)
    if field is None:
        return sources
    if len(sources) == 1 and sources[0].text_field is None:
        return (_with_field(sources[0], key, field),)
    takes = {one for one in sources if one.text_field is None and has_records(one.source)}
    if not takes and any(one.text_field is not None for one in sources):
        raise DataError(
            f"{key} = {field} has no effect: no source is without a #field of its own that has any",
            where=f"{key}; data.mixture",
            rule="it names the field of the sources whose entry names none",
            fix=f"remove {key}",
        )
    if not takes:
        from meshwright.data.sources.record_field import no_effect

        raise no_effect(field, " and ".join(one.source for one in sources), key=key)
    return tuple(_with_field(one, key, field) if one in takes else one for one in sources)


def end_ids(data: DataConfig) -> tuple[int, ...]:
    """Return the ids of the tokens that end what training data teaches to generate: turns of the assistant, documents.

    Raises:
        DataError: see `resolved_sources`; or the tokenizer can't be opened.
    """
    turns: list[int | None] = []
    documents: list[int | None] = []
    for one in resolved_sources(data):
        if one.chat_field is not None:
            from meshwright.data.chats.chat_format import ChatFormat

            turns += [None if (end := ChatFormat(data.tokenizer).turn_end) is None else end.id]
        elif one.use is not Use.VALIDATION:
            tokenizer = open_tokenizer(data.tokenizer, bos=data.bos, separator=data.separator)
            documents += [data.separator] if is_token_file(one.source) else tokenizer.framing.end[:1]
    return tuple(dict.fromkeys(found for found in (*turns, *documents) if found is not None))


def _with_field(one: RunSource, key: str, field: str) -> RunSource:
    return replace(one, chat_field=field) if key == CHAT else replace(one, text_field=field)


def _check_is_text(one: RunSource) -> None:
    if one.source in PRESETS and not Path(one.source).exists():
        with one.named():
            raise DataError(
                f"{one.source} is image data, but this model trains on text",
                where=f"{SOURCE}, {one.source}",
                rule="a text model takes text files or token files",
                fix=f"the preset {PRESETS[one.source]}, or {SOURCE}={STDLIB}",
            )


SOURCE_KEYS = (
    entries.KEY, SOURCE, VALIDATION, TEXT, CHAT, "data.tokenizer", "data.token_dtype", "data.bos",
)  # fmt: skip
"""Keys in which the sources of two runs may differ."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between the sources of two runs, in words.

    Args:
        before: values of the `data` section of the earlier run, by name; keys may be missing.
        now: values of the `data` section of this run.
    """
    earlier, later = (tuple(data.get("mixture") or ()) for data in (before, now))
    found = [] if earlier == later else list(_mixture_changes(earlier, later))
    for key in SOURCE_KEYS[1:]:
        name = key.partition(".")[2]
        first, second = before.get(name, now.get(name)), now.get(name)
        # With a mixture, data.source has no effect.
        if first != second and not (key == SOURCE and (earlier or later)):
            was, is_now = ("not set" if value is None else value for value in (first, second))
            found.append(f"{key} was {was} and is {is_now}")
    return found


def _mixture_changes(before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    if not before or not now:
        yield f"{entries.KEY} was {'not set' if not before else 'set'} and is {'set' if not before else 'not set'}"
        return
    try:
        first, second = _percents(before), _percents(now)
    except ConfigError:  # of a version with other rules
        yield f"{entries.KEY} was {list(before)}"
        return
    yield from (f"{name} was added" for name in second if name not in first)
    yield from (f"{name} was removed" for name in first if name not in second)
    common = [name for name in first if name in second]
    for name in common:
        if first[name] != second[name]:
            yield f"the weight of {name} was {first[name]:.4g}% and is {second[name]:.4g}%"
    if common != [name for name in second if name in first]:
        yield "the sources are in another order"


def _percents(texts: Sequence[str]) -> dict[str, float]:
    found = entries.parse_mixture(texts)
    return {one.name: 100 * share / entries.ONE for one, share in zip(found, entries.shares(found), strict=True)}
