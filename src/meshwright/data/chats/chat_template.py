"""A chat template, in Jinja's language, as a function of messages.

Templates are those of `transformers`, and see the environment that they see there (5.23): a sandbox, without the line
breaks after blocks, with `raise_exception`, `strftime_now`, `tojson`, loop controls and `{% generation %}`. The library
itself takes seconds to import and brings torch along.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.data.chats.messages import MARKS, Message, Span, Written

_START, _END = MARKS
_EITHER = re.compile(f"[{_START}{_END}]")
_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """A compiled chat template; callable from any thread.

    Raises:
        TemplateError: it is malformed.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(template)
        self.has_generation_tags = _TAG.search(template) is not None
        self.uses_date = "strftime_now" in template

    def render(self, messages: Sequence[Message], *, day: date, add_generation_prompt: bool = False) -> Written:
        """Return the text of messages, and what of it is inside `{% generation %}`.

        Raises:
            TemplateError: the template refuses the messages; other exceptions, whatever it does wrong.
        """
        marked = self._template.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            strftime_now=day.strftime,
            **self._special_tokens,
        )
        return _unmarked(marked)


def _unmarked(marked: str) -> Written:
    """Remove the marks of `{% generation %}` from a text, and say where they were."""
    parts: list[str] = []
    spans: list[Span] = []
    begin = length = 0
    # Each text between marks goes with the mark after it, if there is one.
    for part, mark in zip(_EITHER.split(marked), [*_EITHER.findall(marked), ""], strict=True):
        parts.append(part)
        length += len(part)
        if mark == _START:
            begin = length
        elif mark == _END and length > begin:
            spans.append((begin, length))
    return Written("".join(parts), tuple(spans))


class _GenerationTags(Extension):
    """`{% generation %} … {% endgeneration %}` around what the assistant says.

    Marks, rather than positions in the output so far: blocks may be inside macros and assignments.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        """Return what the block gives, between marks."""
        return f"{_START}{caller()}{_END}"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON as it is; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
