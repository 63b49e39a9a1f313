"""Say how the sources of a run differ from those of an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.data.mixtures.entries import KEY, ONE, parse_mixture, shares
from meshwright.errors import ConfigError

KEYS = (
    KEY, "data.source", "data.validation_source", "data.text_field", "data.chat_field", "data.tokenizer",
    "data.token_dtype", "data.bos",
)  # fmt: skip


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between the sources of two runs, in words.

    Args:
        before: values of the `data` section of the earlier run, by name; keys may be missing.
        now: values of the `data` section of this run.
    """
    earlier, later = (tuple(data.get("mixture") or ()) for data in (before, now))
    found = [] if earlier == later else list(_mixture_changes(earlier, later))
    for key in KEYS[1:]:
        name = key.partition(".")[2]
        first, second = before.get(name, now.get(name)), now.get(name)
        # With a mixture, data.source has no effect.
        if first != second and not (key == "data.source" and (earlier or later)):
            found.append(f"{key} was {_value(first)} and is {_value(second)}")
    return found


def _mixture_changes(before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    if not before or not now:
        yield f"{KEY} was {'not set' if not before else 'set'} and is {'set' if not before else 'not set'}"
        return
    try:
        first, second = _weights(before), _weights(now)
    except ConfigError:  # of a version with other rules
        yield f"{KEY} was {list(before)}"
        return
    yield from (f"{name} was added" for name in second if name not in first)
    yield from (f"{name} was removed" for name in first if name not in second)
    common = [name for name in first if name in second]
    for name in common:
        if first[name] != second[name]:
            yield f"the weight of {name} was {_percent(first[name])} and is {_percent(second[name])}"
    if common != [name for name in second if name in first]:
        yield "the sources are in another order"


def _weights(texts: Sequence[str]) -> dict[str, int]:
    entries = parse_mixture(texts)
    return {entry.name: share for entry, share in zip(entries, shares(entries), strict=True)}


def _percent(share: int) -> str:
    return f"{100 * share / ONE:.4g}%"


def _value(value: Any) -> str:
    return "not set" if value is None else str(value)
