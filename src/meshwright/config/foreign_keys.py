"""The error for keys that have another framework's name: all of them at once, with overrides that make a valid run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from meshwright.config.key_fields import fields, is_valid
from meshwright.config.overlay import ConfigOverlay, shorten
from meshwright.config.parse_value import likely_values, parse_value
from meshwright.config.rules import Rules, repair
from meshwright.config.schema import RunConfig, run_type
from meshwright.config.translate import Meaning, normalize, why_unavailable
from meshwright.errors import ConfigError
from meshwright.settings.violation import format_fix

MAX_NAMES = 5


@dataclass(frozen=True)
class ForeignKey:
    """A key as the user named it."""

    name: str
    value: Any
    origin: str
    meaning: Meaning


def foreign_keys_error(
    found: Sequence[ForeignKey], overlay: ConfigOverlay, kind: str, *, num_ranks: int | None, rules: Rules | None
) -> ConfigError:
    """Return the error for one or more keys with another framework's name.

    Args:
        found: the keys, at least one.
        overlay: all other keys.
        kind: family of the model, which has all keys that are meant.
        num_ranks: number of ranks started by a launcher, or None.
        rules: rules that the suggested overrides satisfy, if any do.
    """
    words: dict[str, Any] = {}
    for one in sorted(found, key=lambda one: one.meaning.is_derived):  # these depend on the others
        words[one.meaning.key] = _own_value(one, overlay, kind, words)
    config = _config(overlay, kind, words)
    if config is not None:
        # Keep what the user asked for if the rules allow it.
        more = repair(config, num_ranks, rules, words) or repair(config, num_ranks, rules)
        words |= more or {}
    names = list(dict.fromkeys(one.name for one in found))
    shown = ", ".join(map(shorten, names[:MAX_NAMES])) + (" …" if len(names) > MAX_NAMES else "")
    what = "option" if names[0].startswith("-") else "key"
    return ConfigError(
        f"unknown {what}{'s' if len(names) > 1 else ''} {shown}",
        where=f"{found[0].origin}, {shorten(names[0])}",
        rule="; ".join(_rule(one, kind) for one in {one.name: one for one in found[:MAX_NAMES]}.values()),
        fix=f"{format_fix(words)} in place of {shown}",
    )


def _rule(one: ForeignKey, kind: str) -> str:
    key = one.meaning.key
    value = _translated(one, fields(kind)[key].annotation)
    why = why_unavailable(key, one.name) or why_unavailable(key, one.value if value is None else value)
    return f"{shorten(one.name)} is {key} here ({why or fields(kind)[key].description})"


def _translated(one: ForeignKey, annotation: Any) -> Any:
    """Return the value with the meaning's choices applied, or None if it is none of them."""
    if one.meaning.choices is None:
        return one.value
    choices = {normalize(name): own for name, own in one.meaning.choices.items()}
    text = choices.get(normalize(str(one.value)))
    return None if text is None else parse_value(text, annotation)


def _own_value(one: ForeignKey, overlay: ConfigOverlay, kind: str, words: Mapping[str, Any]) -> Any:
    """Return the value for our key that the user's value stands for; the present one if it doesn't carry over."""
    key, field = one.meaning.key, fields(kind)[one.meaning.key]
    value = (
        _derived(one, _config(overlay, kind, words)) if one.meaning.is_derived else _translated(one, field.annotation)
    )
    candidates = () if value is None else likely_values(key, value, field.annotation)
    present = overlay.get(key, field.default)
    return next((own for own in candidates if is_valid(kind, key, own)), present)


def _derived(one: ForeignKey, config: RunConfig | None) -> Any:
    """Compute our number from one with another meaning; None if it can't be."""
    key, value = one.meaning.key, one.value
    if config is None or isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return None
    if key == "train.num_microbatches":
        per_rank = config.train.global_batch // config.mesh.axes().data_parallel()
        return max(1, round(per_rank / value))
    if key == "train.warmup_steps":
        return round(value * config.train.steps)
    return value / config.train.lr if key == "train.min_lr_ratio" else None


def _config(overlay: ConfigOverlay, kind: str, words: Mapping[str, Any]) -> RunConfig | None:
    """Return the configuration with `words` set, or None if another key is invalid."""
    with suppress(ValidationError):
        return run_type(kind).model_validate(overlay.with_values(words))
    return None
