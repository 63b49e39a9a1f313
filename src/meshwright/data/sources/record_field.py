"""The field of records that is their document: a text (`data.text_field`) or messages (`data.chat_field`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.data.chats import messages
from meshwright.data.text_documents import BOM, damage
from meshwright.errors import DataError
from meshwright.units import first_words

if TYPE_CHECKING:
    from meshwright.data.chats.chat_format import ChatFormat
    from meshwright.data.sources.source_text import RecordText

KEY = "data.text_field"
USUAL_FIELDS = ("text", "content", "body", "raw_content")
"""Names that corpora give their text, the most usual first."""
MOST = 8
"""Fields that a message lists."""
_RULE = "one field of every record is the text of a document"
_STRING_RULE = "the text of every record is a string"


@dataclass(frozen=True, eq=False)
class RecordField:
    """Field of records, or column of a table, of which documents are made.

    Args:
        name: its name.
        format: how conversations are written, if its values are lists of messages; None for texts.
    """

    name: str
    format: ChatFormat | None = field(default=None, repr=False)

    @property
    def key(self) -> str:
        """Key of the configuration that names it."""
        return KEY if self.format is None else messages.KEY

    def identity(self) -> list[Any]:
        """Return JSON values that differ wherever a document does, given the records and the tokenizer."""
        return [self.name if self.format is None else {"chat": self.name, "format": self.format.identity}]

    def document(self, value: Any, place: str, *, likely: str | None) -> RecordText:
        """Return the document of a value, which may be an empty text.

        Args:
            likely: another field that is more likely the text.

        Raises:
            DataError: it is no document.
        """
        if self.format is not None:
            from meshwright.data.chats.chat_format import Conversation

            return Conversation(messages.check_messages(value, self.name, place), place, self.format)
        if not isinstance(value, str):
            raise not_text(self.name, messages.kind_of(value), place, likely)
        if found := damage(value):
            raise DataError(
                f"{self.name} has {found}, in {place}",
                where=f"{KEY}, {self.name}; {place}",
                rule=_STRING_RULE,
                fix="correct or remove the record",
            )
        return value.removeprefix(BOM)

    def missing(self, place: str, names: Sequence[str], *, noun: str, record: Mapping[str, Any]) -> DataError:
        """Return the error for a record or a table without the field.

        Args:
            record: values of the fields, as far as they are known.
        """
        likely = likely_field(record) if self.format is None else messages.likely_chat_field(record)
        return DataError(
            f"{place} has no {noun} {self.name}; it has {first_words(names, MOST)}",
            where=f"{self.key}, {self.name}; {place}",
            rule=_RULE if self.format is None else messages.RULE,
            fix=f"{self.key}={shlex.quote(likely or f'<a {noun} of every record>')}, or correct the data",
        )


def record_field(*, text_field: str | None, chat_field: str | None, tokenizer: str) -> RecordField | None:
    """Return the field that the configuration names, or None.

    Raises:
        DataError: the tokenizer has no chat template that can write conversations.
    """
    assert text_field is None or chat_field is None, "the configuration's rules see that one is given"
    if chat_field is not None:
        from meshwright.data.chats.chat_format import ChatFormat

        return RecordField(chat_field, ChatFormat(tokenizer))
    return None if text_field is None else RecordField(text_field)


def likely_field(record: Mapping[str, Any]) -> str | None:
    """Return the field that is most likely the text: one of a usual name, else the longest string; None without any."""
    strings = {name: value for name, value in record.items() if isinstance(value, str)}
    usual = [name for name in USUAL_FIELDS if name in strings]
    return usual[0] if usual else max(strings, key=lambda name: len(strings[name]), default=None)


def field_not_set(
    found: str, kinds: Mapping[str, str], source: str, *, likely: str | None, chat: str | None
) -> DataError:
    """Return the error for records of which no field is named.

    Args:
        found: where they are, before the fields, as in `x.jsonl has JSON lines; the first has`.
        kinds: the fields, with their types in words.
        source: `data.source`.
        likely: the one that is most likely the text.
        chat: one that has conversations.
    """
    found = f"{found} {first_words([f'{name} ({kind})' for name, kind in kinds.items()], MOST)}"
    if chat is not None:
        return DataError(
            f"{KEY} and {messages.KEY} are not set, and {found}",
            where=f"{messages.KEY}; data.source, {source}",
            rule="one field of every record is the text of a document, or the messages of a conversation",
            fix=f"{messages.KEY}={shlex.quote(chat)} data.packing=documents, with a data.tokenizer for chats",
        )
    return DataError(
        f"{KEY} is not set, and {found}",
        where=f"{KEY}; data.source, {source}",
        rule=_RULE,
        fix=f"{KEY}={shlex.quote(likely or '<a field>')}",
    )


def no_effect(field: str, source: str, *, key: str) -> DataError:
    """Return the error for a field of a source without records; `key` names the field."""
    is_what = "the text" if key == KEY else "a conversation"
    return DataError(
        f"{key} = {field} has no effect: {source} has no JSON lines, Parquet files or saved dataset",
        where=f"{key}; data.source, {source}",
        rule="it names the field of JSON lines, or the column of Parquet files or of a saved dataset, "
        f"that is {is_what}",
        fix=f"remove {key}",
    )


def not_text(text_field: str, kind: str, place: str, likely: str | None) -> DataError:
    """Return the error for a field that is something else than a string, such as `a number`."""
    return DataError(
        f"{text_field} is {kind} in {place}",
        where=f"{KEY}, {text_field}; {place}",
        rule=_STRING_RULE,
        fix=f"{KEY}={shlex.quote(likely)}" if likely else "correct or remove the record",
    )
