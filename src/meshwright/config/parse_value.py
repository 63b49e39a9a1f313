"""Values of keys: the text of an override as a value, and what a value that a key does not take may mean."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from meshwright.config.translate import normalize, value_named

BINARY_UNITS = ("train.seq_len", "model.rope_scaling.original_seq_len", "model.vocab_size", "model.window")
"""Keys whose k is 1,024, as in a context of 128k tokens."""
UNITS = ("", "k", "m", "b")
NUMBER = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?)([kmb]?)")
SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def parse_value(text: str, annotation: Any) -> Any:
    """Parse a TOML value; invalid TOML is taken as a string, so paths and names need no quotes. `none` unsets a key.

    Values of string keys are always strings, even if TOML would parse them as another type: `data.source=2024` is a
    file name.
    """
    kinds = get_args(annotation) or (annotation,)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    if text in ("True", "False"):
        text = text.lower()
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    is_more = len(tree) > 1  # the text has a newline followed by another key
    wanted = (str, list) if get_origin(annotation) is tuple else (str,)
    return text if is_more or (str in kinds and not isinstance(tree["value"], wanted)) else tree["value"]


def likely_values(key: str, value: Any, annotation: Any) -> Iterator[Any]:
    """Yield what a value may mean for a key, most likely first: another framework's word, or a number with a unit."""
    named = value_named(key, value)
    if named is not None:
        yield parse_value(named, annotation)
    kinds = get_args(annotation) or (annotation,)
    text = str(value).strip().lower()
    if bool in kinds and text in SWITCHES:
        yield SWITCHES[text]
    if (found := NUMBER.fullmatch(re.sub("[,_]", "", text))) and not isinstance(value, bool):
        number = float(found[1]) * (1024 if key in BINARY_UNITS else 1000) ** UNITS.index(found[2])
        if int in kinds and number.is_integer():
            yield int(number)
        if float in kinds:
            yield number
    yield from (one for one in kinds if isinstance(one, str) and normalize(one) == normalize(text))
    if str in kinds:
        yield str(value)
    yield value
