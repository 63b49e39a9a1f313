"""The field of records that is their document: a text (`data.text_field`) or messages (`data.chat_field`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshwright.data.chats.chat_format import ChatFormat, Conversation
from meshwright.data.chats.messages import KEY as CHAT_KEY
from meshwright.data.chats.messages import RULE as CHAT_RULE
from meshwright.data.chats.messages import check_messages, kind_of, likely_chat_field
from meshwright.data.sources import text_fields
from meshwright.data.sources.source_text import RecordText
from meshwright.data.sources.text_fields import MOST, check_damage, likely_field, not_text
from meshwright.data.text_documents import BOM
from meshwright.errors import DataError
from meshwright.units import first_words


class RecordField(Protocol):
    """Field of records of which documents are made."""

    @property
    def name(self) -> str:
        """Name of the field, or of the column of a table."""

    @property
    def key(self) -> str:
        """Key of the configuration that names it."""

    @property
    def is_text(self) -> bool:
        """True if its values are strings, false if they are lists of messages."""

    @property
    def format(self) -> ChatFormat | None:
        """Format that conversations are written in; None for texts."""

    def identity(self) -> list[Any]:
        """Return JSON values that differ wherever a document does, given the records and the tokenizer."""

    def document(self, value: Any, place: str, *, likely: str | None) -> RecordText:
        """Return the document of a value, which may be an empty text.

        Args:
            value: the value.
            place: file and number of its record.
            likely: another field that is more likely the text.

        Raises:
            DataError: it is no document.
        """

    def missing(self, place: str, names: Sequence[str], *, noun: str, record: Mapping[str, Any]) -> DataError:
        """Return the error for a record or a table without the field.

        Args:
            place: the record or file.
            names: fields that it has.
            noun: what a field is called there: field or column.
            record: values of the fields, as far as they are known.
        """


@dataclass(frozen=True)
class TextField:
    """Field that is the text of a document."""

    name: str
    key: str = "data.text_field"
    is_text: bool = True
    format: None = None

    def identity(self) -> list[Any]:
        return [self.name]

    def document(self, value: Any, place: str, *, likely: str | None) -> RecordText:
        if not isinstance(value, str):
            raise not_text(self.name, kind_of(value), place, likely)
        check_damage(value, self.name, place)
        return value.removeprefix(BOM)

    def missing(self, place: str, names: Sequence[str], *, noun: str, record: Mapping[str, Any]) -> DataError:
        return text_fields.no_such_field(self.name, place, names, noun=noun, likely=likely_field(record))


@dataclass(frozen=True, eq=False)
class ChatField:
    """Field that is the list of messages of a conversation."""

    name: str
    format: ChatFormat = field(repr=False)
    key: str = CHAT_KEY
    is_text: bool = False

    def identity(self) -> list[Any]:
        return [{"chat": self.name, "format": self.format.identity}]

    def document(self, value: Any, place: str, *, likely: str | None) -> RecordText:
        return Conversation(check_messages(value, self.name, place), place, self.format)

    def missing(self, place: str, names: Sequence[str], *, noun: str, record: Mapping[str, Any]) -> DataError:
        likely = likely_chat_field(record) or f"<a {noun} of every record>"
        return DataError(
            f"{place} has no {noun} {self.name}; it has {first_words(names, MOST)}",
            where=f"{CHAT_KEY}, {self.name}; {place}",
            rule=CHAT_RULE,
            fix=f"{CHAT_KEY}={shlex.quote(likely)}, or correct the data",
        )


def record_field(*, text_field: str | None, chat_field: str | None, tokenizer: str) -> RecordField | None:
    """Return the field that the configuration names, or None.

    Raises:
        DataError: the tokenizer has no chat template that can write conversations.
    """
    assert text_field is None or chat_field is None, "the configuration's rules see that one is given"
    if chat_field is not None:
        return ChatField(chat_field, ChatFormat(tokenizer))
    return None if text_field is None else TextField(text_field)
