"""Find the field of records that is the text of a document, `data.text_field`: of lines of JSON, or rows of tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.data.text_documents import damage
from meshwright.errors import DataError
from meshwright.units import first_words

USUAL_FIELDS = ("text", "content", "body", "raw_content")
"""Names that corpora give their text, the most usual first."""
MOST = 8
"""Fields that a message lists."""
RULE = "one field of every record is the text of a document"


def likely_field(record: Mapping[str, Any]) -> str | None:
    """Return the field that is most likely the text: one of a usual name, else the longest string; None without any."""
    strings = {name: value for name, value in record.items() if isinstance(value, str)}
    usual = [name for name in USUAL_FIELDS if name in strings]
    return usual[0] if usual else max(strings, key=lambda name: len(strings[name]), default=None)


def list_fields(kinds: Mapping[str, str]) -> str:
    """List the first fields with their types, as in `url (a string) and id (a number)`."""
    return first_words([f"{name} ({kind})" for name, kind in kinds.items()], MOST)


def field_not_set(found: str, likely: str | None, source: str, *, chat: str | None = None) -> DataError:
    """Return the error for records without `data.text_field`, given what was found instead.

    Args:
        found: the fields.
        likely: the one that is most likely the text.
        source: `data.source`.
        chat: a field that has conversations.
    """
    if chat is not None:
        return DataError(
            f"data.text_field and data.chat_field are not set, and {found}",
            where=f"data.chat_field; data.source, {source}",
            rule="one field of every record is the text of a document, or the messages of a conversation",
            fix=f"data.chat_field={shlex.quote(chat)} data.packing=documents, with a data.tokenizer for chats",
        )
    return DataError(
        f"data.text_field is not set, and {found}",
        where=f"data.text_field; data.source, {source}",
        rule=RULE,
        fix=f"data.text_field={shlex.quote(likely or '<a field>')}",
    )


def no_effect(field: str, source: str, *, key: str = "data.text_field") -> DataError:
    """Return the error for a field of a source without records; `key` names the field."""
    is_what = "the text" if key == "data.text_field" else "a conversation"
    return DataError(
        f"{key} = {field} has no effect: {source} has no JSON lines, Parquet files or saved dataset",
        where=f"{key}; data.source, {source}",
        rule="it names the field of JSON lines, or the column of Parquet files or of a saved dataset, "
        f"that is {is_what}",
        fix=f"remove {key}",
    )


def no_such_field(text_field: str, place: str, names: Sequence[str], *, noun: str, likely: str | None) -> DataError:
    """Return the error for a record or a table that lacks the field.

    Args:
        text_field: the field.
        place: the record or file.
        names: fields that it has.
        noun: what a field is called there: field or column.
        likely: the field that is most likely the text.
    """
    return DataError(
        f"{place} has no {noun} {text_field}; it has {first_words(names, MOST)}",
        where=f"data.text_field, {text_field}; {place}",
        rule=RULE,
        fix=f"data.text_field={shlex.quote(likely or f'<a {noun} of every record>')}, or correct the data",
    )


def not_text(text_field: str, kind: str, place: str, likely: str | None) -> DataError:
    """Return the error for a field that is something else than a string, such as `a number`."""
    return DataError(
        f"{text_field} is {kind} in {place}",
        where=f"data.text_field, {text_field}; {place}",
        rule="the text of every record is a string",
        fix=f"data.text_field={shlex.quote(likely)}" if likely else "correct or remove the record",
    )


def check_damage(text: str, text_field: str, place: str) -> None:
    """Check that a text has nothing that no document may have.

    Raises:
        DataError: it has a zero character or half a surrogate pair.
    """
    if found := damage(text):
        raise DataError(
            f"{text_field} has {found}, in {place}",
            where=f"data.text_field, {text_field}; {place}",
            rule="the text of every record is a string",
            fix="correct or remove the record",
        )
