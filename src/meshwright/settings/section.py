"""Base classes for configuration sections, and custom key types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer


class Section(BaseModel):
    """Immutable configuration section that rejects unknown keys. Keys are documented in their descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """Base class of a family's `model` section; all keys of a subclass must have defaults."""

    kind: str = Field(description="family: a built-in one, or package.module:Family for your own")


Counts = Annotated[tuple[int, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""Tuple of integers, written as a list."""


def _as_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_names),
]
"""Tuple of strings, written as a list or as a single string."""


def _as_pairs(value: Any) -> Any:
    if not isinstance(value, Mapping | tuple):
        raise ValueError("a table is needed, as in {name=1}")
    return tuple((key, _hashable(inner)) for key, inner in value.items()) if isinstance(value, Mapping) else value


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


TABLE_TYPE = tuple[tuple[str, Any], ...]
Table = Annotated[TABLE_TYPE, BeforeValidator(_as_pairs), PlainSerializer(dict)]
"""Values by names of the user's choice, as pairs; written as a table, or each by a key of its own."""


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the section types in a key's annotation, including optional ones."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_in(inner)]
