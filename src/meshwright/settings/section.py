"""A section of the configuration, a frozen pydantic model that refuses unknown keys, and types of keys."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A section: immutable, and an unknown key is an error. A key's meaning stands once, in its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """The section `model` of a family; it derives from this, and every other key of it has a default."""

    kind: str = Field(description="family: one of ours, or package.module:Family of your own")


Counts = Annotated[tuple[int, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""Integers, written as a list."""


def _as_names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_names),
]
"""Words, written as a list, or one alone."""


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a key's type is, or may be: one inside an optional, too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_in(inner)]
