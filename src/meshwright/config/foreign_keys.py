"""The error for keys that have another framework's name: all of them at once, with overrides that make a valid run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import ValidationError

from meshwright.config.foreign_names import DIFFERENCES
from meshwright.config.key_fields import fields, is_valid
from meshwright.config.overlay import ConfigOverlay, shorten
from meshwright.config.parse_value import likely_values, parse_value
from meshwright.config.rules import Rules, repair
from meshwright.config.schema import RunConfig, run_type
from meshwright.config.translate import Meaning, normalize, why_unavailable
from meshwright.errors import ConfigError
from meshwright.settings.violation import Fix, format_fix, format_value

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
    asked: dict[str, Any] = {}
    for one in sorted(found, key=lambda one: one.meaning.is_derived):  # these depend on the others
        asked |= _carried(one, overlay, kind, asked) or {}
    kept = {one.meaning.key: _present(one.meaning.key, overlay, kind) for one in found if one.meaning.key not in asked}
    words = asked | kept
    config = _config(overlay, kind, words)
    if config is not None:
        # Keep what the user asked for if the rules allow it.
        words |= repair(config, num_ranks, rules, words) or repair(config, num_ranks, rules) or {}
    notes = [f"{key} = {format_value(value)} does not fit" for key, value in asked.items() if words[key] != value]
    notes += [f"{key} as it was" for key in kept]
    names = list(dict.fromkeys(one.name for one in found))
    shown = ", ".join(map(shorten, names[:MAX_NAMES])) + (" …" if len(names) > MAX_NAMES else "")
    what = "option" if names[0].startswith("-") else "key"
    return ConfigError(
        f"unknown {what}{'s' if len(names) > 1 else ''} {shown}",
        where=f"{found[0].origin}, {shorten(names[0])}",
        rule="; ".join(_rule(one, kind, brief=len(names) > 1) for one in found[:MAX_NAMES]),
        fix=f"{format_fix(words)} in place of {shown}" + (f" ({', '.join(notes)})" if notes else ""),
    )


def _rule(one: ForeignKey, kind: str, *, brief: bool) -> str:
    key = one.meaning.key
    difference = DIFFERENCES[key] if one.meaning.is_derived else why_unavailable(key, one.name, one.value)
    about = difference or ("" if brief else fields(kind)[key].description)
    return f"{shorten(one.name)} is {key} here" + (f" ({about})" if about else "")


def _carried(one: ForeignKey, overlay: ConfigOverlay, kind: str, words: Mapping[str, Any]) -> Fix | None:
    """Return our key with the value that the user's stands for; None if the key doesn't take it."""
    key, value = one.meaning.key, one.value
    if one.meaning.is_derived:
        return _derived(one, _config(overlay, kind, words), words)
    annotation = fields(kind)[key].annotation
    choices = {normalize(name): own for name, own in (one.meaning.choices or {}).items()}
    chosen = choices.get(normalize(str(value)))
    candidates = likely_values(key, value, annotation) if chosen is None else [parse_value(chosen, annotation)]
    # Configurations are hashed, so a list is a tuple; a single string may stand for one.
    is_tuple = get_origin(annotation) is tuple
    words_of = ([own] if is_tuple and isinstance(own, str) else own for own in candidates)
    frozen = (tuple(own) if isinstance(own, list) else own for own in words_of)
    return next(({key: own} for own in frozen if is_valid(kind, key, own)), None)


def _present(key: str, overlay: ConfigOverlay, kind: str) -> Any:
    return overlay.get(key, fields(kind)[key].default)


def _derived(one: ForeignKey, config: RunConfig | None, words: Mapping[str, Any]) -> Fix | None:
    """Compute our number from one with another meaning; None if it can't be."""
    key, value = one.meaning.key, one.value
    if config is None or isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return None
    train, num_data_ranks = config.train, config.mesh.axes().data_parallel()
    if key == "train.num_microbatches":
        if key in words and "train.global_batch" not in words and isinstance(value, int):
            return {"train.global_batch": value * words[key] * num_data_ranks}
        return {key: max(1, round(train.global_batch / num_data_ranks / value))}
    if key == "pipeline.chunks":
        return {key: max(1, round(getattr(config.model, "num_layers", 1) / config.mesh.pp / value))}
    if key == "train.validation_samples":
        return {key: round(value * train.global_batch)}
    if key == "train.warmup_steps":
        return {key: round(value * train.steps)}
    return {key: min(1.0, value / train.lr)} if key == "train.min_lr_ratio" else None


def _config(overlay: ConfigOverlay, kind: str, words: Mapping[str, Any]) -> RunConfig | None:
    """Return the configuration with `words` set, or None if another key is invalid."""
    with suppress(ValidationError):
        return run_type(kind).model_validate(overlay.with_values(words))
    return None
