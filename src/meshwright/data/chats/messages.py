"""Check the messages of a conversation: a list of objects with a role and a text, `content`.

A conversation as text, and the parts of it that count in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.data.text_documents import BOM, damage
from meshwright.errors import DataError
from meshwright.units import counted, first_words, join_words

Message = dict[str, Any]

KEY = "data.chat_field"
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT)
RULE = 'a conversation is a list of {"role": …, "content": …}, of which the assistant has at least one'
MARKS = ("\ufdd0", "\ufdd1")
"""Noncharacters, which no text has, around what is inside `{% generation %}` while a template is rendered."""

_OTHER_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT, "ai": ASSISTANT}
_TOOLS = ("tool_calls", "function_call", "tool_call_id")
_TOOL_ROLES = ("tool", "function", "ipython")
_MOST = 8
_CONVERT = "convert the data to messages with role and content"
_LEAVE_OUT = "leave such conversations out"


def likely_chat_field(record: Mapping[str, Any]) -> str | None:
    """Return the first field of a record that is a list of messages; None without any."""
    return next((name for name, value in record.items() if _is_like_messages(value)), None)


def check_messages(value: Any, field: str, place: str) -> list[Message]:
    """Return the messages of a record, without keys that are null.

    Raises:
        DataError: it is no conversation of texts in which the assistant says something.
    """
    if not isinstance(value, list):
        raise _bad(f"{field} is {kind_of(value)}, not a list of messages, in {place}", field, place, _CONVERT)
    if not value:
        raise _bad(f"{field} is empty in {place}: a conversation without messages", field, place, "remove the record")
    messages = [_message(one, number, field, place) for number, one in enumerate(value, start=1)]
    if not any(message["role"] == ASSISTANT for message in messages):
        roles = join_words(sorted({str(message["role"]) for message in messages}))
        what = f"the assistant says nothing in {place}: {counted(len(messages), 'message')} of {roles}"
        raise _bad(what, field, place, "remove the record: none of its tokens would count in the loss")
    return messages


def kind_of(value: Any) -> str:
    """Return what JSON calls the type of a value, with its article."""
    kinds = {dict: "an object", list: "an array", bool: "a boolean", int: "a number", float: "a number",
             str: "a string", type(None): "null"}  # fmt: skip
    return kinds.get(type(value), f"of type {type(value).__name__}")


def _message(one: Any, number: int, field: str, place: str) -> Message:
    name = f"message {number} of {field}"
    if not isinstance(one, dict):
        raise _bad(f"{name} is {kind_of(one)}, not an object, in {place}", field, place, _CONVERT)
    message = {key: value for key, value in one.items() if value is not None}
    if any(message.get(key) for key in _TOOLS):
        key = next(key for key in _TOOLS if message.get(key))
        raise _bad(f"{name} has {key} in {place}: tools can't be trained on yet", field, place, _LEAVE_OUT)
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        has = first_words(list(message), _MOST)
        fix = 'convert "from" and "value" to "role" and "content"' if "value" in message else _CONVERT
        raise _bad(f"{name} has no {' and no '.join(missing)} in {place}; it has {has}", field, place, fix)
    if message.get("weight", 1) != 1:
        what = f"{name} has the weight {message['weight']} in {place}, and weights of messages can't be trained with"
        raise _bad(what, field, place, _LEAVE_OUT)
    _check_role(message["role"], name, field, place)
    _check_content(message["content"], name, field, place)
    message["content"] = message["content"].removeprefix(BOM)
    return message


def _check_role(role: Any, name: str, field: str, place: str) -> None:
    if role in ROLES:
        return
    what = f"{name} has the role {role!r} in {place}"
    if role in _TOOL_ROLES:
        raise _bad(f"{what}: tools can't be trained on yet", field, place, _LEAVE_OUT)
    other = _OTHER_ROLES.get(role.lower(), role.lower()) if isinstance(role, str) else None
    fix = f'"role": "{other}"' if other in ROLES else _CONVERT
    raise _bad(f"{what}, which is none of {join_words(ROLES)}", field, place, fix)


def _check_content(content: Any, name: str, field: str, place: str) -> None:
    if isinstance(content, list):
        what = f"the content of {name} is a list of parts in {place}, and only text can be trained on"
        raise _bad(what, field, place, f'"content" as one string; of conversations with images or audio, {_LEAVE_OUT}')
    if not isinstance(content, str):
        raise _bad(f"the content of {name} is {kind_of(content)} in {place}", field, place, '"content" as a string')
    found = damage(content) or ("a noncharacter" if any(mark in content for mark in MARKS) else "")
    if found:
        raise _bad(f"the content of {name} has {found}, in {place}", field, place, "correct or remove the record")


def _is_like_messages(value: Any) -> bool:
    messages: Sequence[Any] = value if isinstance(value, list) else ()
    return bool(messages) and all(isinstance(one, dict) and "role" in one and "content" in one for one in messages)


def _bad(what: str, field: str, place: str, fix: str) -> DataError:
    return DataError(what, where=f"{KEY}, {field}; {place}", rule=RULE, fix=fix)


Span = tuple[int, int]
"""First character of a part of a text, and the one after its last."""


class Written(NamedTuple):
    """Text of messages."""

    text: str
    spans: tuple[Span, ...]
