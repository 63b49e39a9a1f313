"""Write a conversation by a chat template, and find the parts that the assistant says. Torch-free.

A template with `{% generation %}` says itself what they are. Without, a turn of the assistant is what the text of the
messages through it has beyond the text before it, which ends with the generation prompt: the model's output in a chat,
its end-of-turn token included. That holds only if the text of earlier messages is how that of later ones begins, which
is checked. The line break that most templates write after the end-of-turn token is no part of the turn: nothing is
generated after that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

from meshwright.data.chats.messages import ASSISTANT, Message
from meshwright.data.chats.written import Span, Written

if TYPE_CHECKING:
    from meshwright.data.chats.chat_template import ChatTemplate


class AmbiguousTurnsError(Exception):
    """The template's text doesn't say what the assistant's turns are."""


def write_conversation(
    template: ChatTemplate, messages: Sequence[Message], *, day: date, special_tokens: Sequence[str]
) -> Written:
    """Return the text of a conversation, and the assistant's parts of it.

    Args:
        template: the chat template.
        messages: checked messages.
        day: see `ChatTemplate.render`.
        special_tokens: texts of all special tokens, of which one may end a turn.

    Raises:
        AmbiguousTurnsError: the template has no `{% generation %}` and writes earlier turns in another way later.
        TemplateError: the template refuses the messages; other exceptions, whatever it does wrong.
    """
    whole = template.render(messages, day=day)
    if template.has_generation_tags:
        return whole
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = template.render(messages[:number], day=day, add_generation_prompt=True).text
        through = template.render(messages[: number + 1], day=day).text
        if not whole.text.startswith(through):
            raise AmbiguousTurnsError(f"it writes message {number + 1} in another way once messages follow it")
        if not through.startswith(before):
            raise AmbiguousTurnsError(f"its generation prompt is not how it begins message {number + 1}")
        spans.append(_without_space_after_end(whole.text, (len(before), len(through)), special_tokens))
    return Written(whole.text, tuple(spans))


def _without_space_after_end(text: str, span: Span, special_tokens: Sequence[str]) -> Span:
    """Return a turn without white space that follows its end-of-turn token."""
    start, end = span
    turn = text[start:end].rstrip()
    return (start, start + len(turn)) if turn.endswith(tuple(special_tokens)) else span
