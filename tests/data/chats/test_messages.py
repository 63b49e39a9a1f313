"""Messages of a record: what is no conversation of texts is named with its place, and a fix."""

from __future__ import annotations

import pytest

from meshwright.data.chats.messages import check_messages, likely_chat_field
from meshwright.errors import DataError
from tests.data.chats.formats import chat

ASK, SAY = chat("a", "b")
BROKEN = {
    "text": ("hello", "messages is a string, not a list of messages, in f.jsonl:3", "role and content"),
    "null": (None, "messages is null", "role and content"),
    "columns": ({"role": ["user"], "content": ["a"]}, "messages is an object", "role and content"),
    "empty": ([], "messages is empty in f.jsonl:3", "remove"),
    "no assistant": ([ASK], "the assistant says nothing in f.jsonl:3: 1 message of user", "remove"),
    "a string in it": ([ASK, "b"], "message 2 of messages is a string, not an object", "role and content"),
    "ShareGPT": ([{"from": "human", "value": "a"}], "message 1 of messages has no role and no content in f.jsonl:3; "
                 "it has from and value", '"from" and "value" to "role" and "content"'),
    "no content": ([ASK, {"role": "assistant", "content": None}], "message 2 of messages has no content", "content"),
    "a number": ([ASK, {"role": "assistant", "content": 4}], "the content of message 2 of messages is a number", "str"),
    "parts": ([{"role": "user", "content": [{"type": "image"}]}, SAY], "the content of message 1 of messages is a list "
              "of parts in f.jsonl:3, and only text", "leave such conversations out"),
    "tool calls": ([ASK, {"role": "assistant", "content": None, "tool_calls": [{}]}], "message 2 of messages has "
                   "tool_calls in f.jsonl:3: tools can't be trained on", "leave such conversations out"),
    "tool results": ([ASK, {"role": "tool", "content": "4"}, SAY], "has the role 'tool'", "leave such"),
    "another role": ([ASK, {"role": "gpt", "content": "b"}], "has the role 'gpt' in f.jsonl:3, which is none of "
                     "system, developer, user and assistant", '"role": "assistant"'),
    "a role in capitals": ([{"role": "User", "content": "b"}, SAY], "has the role 'User'", '"role": "user"'),
    "a role that is no text": ([{"role": 1, "content": "b"}, SAY], "has the role 1", "role and content"),
    "weights": ([ASK, SAY | {"weight": 0}], "has the weight 0 in f.jsonl:3", "leave such"),
    "a zero character": ([ASK, SAY | {"content": "\0"}], "has a zero character", "correct or remove"),
    "half a pair": ([ASK, SAY | {"content": "\ud83d"}], "half a surrogate pair", "correct or remove"),
    "a noncharacter": ([ASK, SAY | {"content": "\ufdd0"}], "has a noncharacter", "correct or remove"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_conversation_is_refused(name):
    value, says, fix = BROKEN[name]
    with pytest.raises(DataError) as caught:
        check_messages(value, "messages", "f.jsonl:3")
    error = caught.value
    assert says in error.what and fix in error.fix
    assert error.where == "data.chat_field, messages; f.jsonl:3" and error.rule


def test_what_is_null_is_left_out_and_the_rest_is_for_the_template():
    message = {"role": "assistant", "content": "", "tool_calls": None, "weight": 1, "reasoning_content": "r"}
    assert check_messages([ASK, message], "m", "p") == [
        ASK, {"role": "assistant", "content": "", "weight": 1, "reasoning_content": "r"}]  # fmt: skip


def test_the_field_of_conversations_is_found():
    assert likely_chat_field({"id": 1, "text": "a", "tags": [], "said": [ASK, SAY]}) == "said"
    assert likely_chat_field({"id": [1], "said": [{"from": "human"}]}) is None
