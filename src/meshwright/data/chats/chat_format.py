"""Conversations as tokens and a loss mask, by the chat template and the tokens of one tokenizer.

The full text of a conversation is encoded at once, so tokens are those of `apply_chat_template(…)` in `transformers`:
special tokens in it are special, and none is added. A token counts in the loss if any of its characters are the
assistant's: of a token on a border, which has some of the prompt too, and of every token of a character that takes
several.

The template is found as `transformers` finds it: `chat_template.jinja` before `tokenizer_config.json`, in which a
template is a text or a list of named ones, of which `default` is that of conversations.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chats.messages import ASSISTANT, RULE, Message, Span, Written
from meshwright.data.tokenizer import Tokens, open_backend, require_tokenizers, token_dtype, tokenizer_path
from meshwright.data.tokenizer_files import BYTES, TOKENIZER_CONFIG, TOKENS_MAP, read_json, read_text, token_text
from meshwright.errors import DataError

if TYPE_CHECKING:
    from meshwright.data.chats.chat_template import ChatTemplate

MASK_RULE = 1
"""Increment when the same conversation would get other tokens or another mask."""
GENERATION_TAGS = "{% generation %} … {% endgeneration %} around what the assistant says"
TEMPLATE = "chat_template.jinja"
OLDER_TEMPLATE = "chat_template.json"
TEMPLATE_RULE = "conversations are written by the chat template of the tokenizer"
_DEFAULT = "default"
_TOKEN = "_token"
"""Endings of the names of special tokens: `bos_token`, `eos_token`, and those of one model."""


class EncodedConversation(NamedTuple):
    """A conversation as tokens."""

    ids: Tokens
    counts: NDArray[np.bool_]
    """Whether each token counts in the loss."""


class Token(NamedTuple):
    """A token of a tokenizer."""

    id: int
    text: str


class ChatFormat:
    """Chat template and tokens of a tokenizer; callable from any thread.

    Raises:
        DataError: it has no chat template or a malformed one, or the `tokenizers` package is missing.
    """

    def __init__(self, tokenizer: str) -> None:
        from meshwright.data.chats.chat_template import ChatTemplate  # Jinja's import takes 0.1 s

        self._files = find_template(tokenizer)
        require_tokenizers(self._files.path)
        try:
            self._template = ChatTemplate(self._files.template, self._files.special_tokens)
        except Exception as error:  # TemplateSyntaxError, and what else compiling a template may raise
            raise DataError(
                f"{self._files.template_path} is no chat template: {error}",
                where=f"data.tokenizer, {self._files.template_path}",
                rule="a chat template is in Jinja's language, as transformers reads it",
                fix="correct the template",
            ) from None
        self.today = date.today()

    @property
    def identity(self) -> str:
        """SHA-256 of what decides text and mask: the template, the tokens that it may name, and the mask's rule."""
        parts = [MASK_RULE, self._files.template, sorted(self._files.special_tokens.items())]
        return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()

    @property
    def uses_date(self) -> bool:
        """True if the template may write the date."""
        return self._template.uses_date

    @property
    def files(self) -> TemplateFiles:
        """The template, and where it is."""
        return self._files

    def write(self, conversation: Conversation, *, day: date | None = None) -> Written:
        """Return the text of a conversation, and the assistant's parts of it.

        Args:
            day: today, for templates that write it; the day on which this object was made if None.

        Raises:
            DataError: the template refuses it, or doesn't say what the assistant's turns are.
        """
        place, path = conversation.place, self._files.template_path
        try:
            return write_conversation(
                self._template, conversation.messages, day=day or self.today, special_tokens=self._special_texts
            )
        except AmbiguousTurnsError as error:
            raise DataError(
                f"the chat template does not say which tokens are the assistant's: {error}, of {place}",
                where=f"data.tokenizer, {path}; {place}",
                rule="a turn of the assistant is the text through it without the text before it, which ends with the "
                "generation prompt, unless the template has {% generation %}",
                fix=f"in {path}, write {GENERATION_TAGS}",
            ) from None
        except Exception as error:  # whatever a template makes of messages that it doesn't expect
            raise DataError(
                f"the chat template refuses {place}: {error}",
                where=f"data.tokenizer, {path}; {place}",
                rule="the chat template takes the messages of every conversation",
                fix="correct or remove the conversation, or another chat template",
            ) from None

    @cached_property
    def turn_end(self) -> Token | None:
        """The token that ends a turn of the assistant and counts in the loss; None if none was found."""
        asked, said = "What is two and two?", "It is four."
        messages = [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": said}]
        try:
            written = self.write(Conversation(messages, "a question and its answer", self))
        except DataError:  # it takes other conversations only
            return None
        [encoding] = self.encodings([written])
        counts = in_spans(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2), written.spans)
        after = written.text.rfind(said) + len(said)
        tail = [
            token
            for token, (start, end), counted in zip(encoding.ids, encoding.offsets, counts, strict=True)
            if counted and start >= after and not written.text[start:end].isspace()
        ]
        found = self._backend.get_added_tokens_decoder().get(tail[-1]) if tail else None
        return None if found is None else Token(tail[-1], found.content)

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[EncodedConversation]:
        """Encode conversations on all cores.

        Raises:
            DataError: the template or the tokenizer refuses one, or no token of one counts.
        """
        written = [self.write(one) for one in conversations]
        found = []
        for one, text, encoding in zip(conversations, written, self.encodings(written), strict=True):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            counts = in_spans(offsets, text.spans)
            if not counts[1:].any():  # The first token is no target.
                path = self._files.template_path
                raise DataError(
                    f"no token of {one.place} counts in the loss: the chat template has none inside its "
                    "{% generation %}",
                    where=f"data.tokenizer, {path}; {one.place}",
                    rule=f"{RULE}, and the template says which part of the text that is",
                    fix=f"in {path}, write {GENERATION_TAGS}",
                )
            found.append(EncodedConversation(np.array(encoding.ids, dtype=self._dtype), counts))
        return found

    def encode_question(self, text: str) -> list[int]:
        """Return the ids of what a user says, and of what the assistant's turn begins with.

        Raises:
            DataError: the tokenizer refuses it.
        """
        question = [{"role": "user", "content": text}]
        written = self._template.render(question, day=self.today, add_generation_prompt=True)
        ids: list[int] = self.encodings([written])[0].ids
        return ids

    def encodings(self, texts: Sequence[Written]) -> list[Any]:
        """Return texts as the `tokenizers` package encodes them, with `ids` and `offsets`."""
        try:
            return list(self._backend.encode_batch([one.text for one in texts], add_special_tokens=False))
        except Exception as error:  # The package raises bare Exception for what its model can't encode.
            raise DataError(
                f"{self._files.path} fails on a conversation: {error}",
                where=f"data.tokenizer, {self._files.path}",
                rule="the tokenizer encodes every text",
                fix="another tokenizer, or conversations that it encodes",
            ) from None

    @cached_property
    def _backend(self) -> Any:
        backend = open_backend(self._files.path)
        # It would add tokens, or leave white space out of the tokens' places in the text.
        backend.post_processor = None
        return backend

    @cached_property
    def _dtype(self) -> np.dtype[np.unsignedinteger]:
        return token_dtype(max(self._backend.get_vocab(with_added_tokens=True).values()) + 1)

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special and token.content)


@dataclass(frozen=True, eq=False, slots=True)
class Conversation:
    """A conversation, which is written when it is encoded.

    Args:
        messages: checked messages (see `messages.py`).
        place: file and number of its record.
        format: template and tokens.
    """

    messages: list[Message] = field(repr=False)
    place: str
    format: ChatFormat = field(repr=False)

    @property
    def num_chars(self) -> int:
        """Number of characters of the messages."""
        return sum(len(message["content"]) for message in self.messages)

    def data(self) -> bytes:
        """Return bytes that differ wherever the text does, given the tokenizer."""
        day = self.format.today.isoformat() if self.format.uses_date else ""
        return json.dumps([day, self.messages]).encode("ascii")


def in_spans(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return which tokens have characters in any of the spans.

    Args:
        offsets: first character of each token, and the one after its last, [tokens, 2]; equal for a token without any,
            which is where the next one begins.
        spans: parts of the text.
    """
    starts, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    found = np.zeros(len(offsets), dtype=np.bool_)
    for first, last in spans:
        found |= (starts < last) & (ends > first)
    return found


class AmbiguousTurnsError(Exception):
    """The template's text doesn't say what the assistant's turns are."""


def write_conversation(
    template: ChatTemplate, messages: Sequence[Message], *, day: date, special_tokens: Sequence[str]
) -> Written:
    """Return the text of a conversation, and the assistant's parts of it.

    A template with `{% generation %}` says itself what they are. Without, a turn of the assistant is what the text of
    the messages through it has beyond the text before it, which ends with the generation prompt: the model's output in
    a chat, its end-of-turn token included. That holds only if the text of earlier messages is how that of later ones
    begins, which is checked. The line break that most templates write after the end-of-turn token is no part of the
    turn: nothing is generated after that token.

    Args:
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
        # No white space that follows the end-of-turn token.
        turn = through[len(before) :].rstrip()
        end = len(before) + len(turn) if turn.endswith(tuple(special_tokens)) else len(through)
        spans.append((len(before), end))
    return Written(whole.text, tuple(spans))


@dataclass(frozen=True)
class TemplateFiles:
    """A chat template as its tokenizer's files have it.

    Args:
        special_tokens: texts of the tokens that a template may name, such as `bos_token`.
    """

    path: Path
    template_path: Path
    template: str
    special_tokens: dict[str, str]


def find_template(tokenizer: str) -> TemplateFiles:
    """Find the chat template of the tokenizer that `data.tokenizer` names.

    Raises:
        DataError: the tokenizer is bytes, has no chat template, or its files can't be read.
    """
    if tokenizer == BYTES:
        raise _no_template("data.tokenizer = bytes has no chat template", tokenizer)
    path = tokenizer_path(tokenizer)
    folder = path.parent
    config = read_json(folder / TOKENIZER_CONFIG)
    tokens = {**read_json(folder / TOKENS_MAP), **config}
    special_tokens = {name: text for name in tokens if name.endswith(_TOKEN) and (text := token_text(tokens[name]))}
    if (folder / TEMPLATE).is_file():
        return TemplateFiles(path, folder / TEMPLATE, read_text(folder / TEMPLATE), special_tokens)
    for name in (TOKENIZER_CONFIG, OLDER_TEMPLATE):
        found = read_json(folder / name).get("chat_template")
        if found is not None:
            return TemplateFiles(path, folder / name, _chosen(found, folder / name, tokenizer), special_tokens)
    raise _no_template(f"{folder} has no chat template", tokenizer)


def _chosen(found: Any, path: Path, tokenizer: str) -> str:
    """Return the template of conversations, given the value in a file: a text, or named ones."""
    if isinstance(found, str):
        return found
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    if isinstance(found, dict) and isinstance(found.get(_DEFAULT), str):
        return str(found[_DEFAULT])
    raise _no_template(f"{path} has no chat template of the name {_DEFAULT}", tokenizer)


def _no_template(what: str, tokenizer: str) -> DataError:
    folder = "<folder>" if tokenizer == BYTES else shlex.quote(str(tokenizer_path(tokenizer).parent))
    return DataError(
        what,
        where=f"data.tokenizer, {tokenizer}; data.chat_field",
        rule=TEMPLATE_RULE,
        fix=f"data.tokenizer=<the folder of a model's tokenizer>, with {TOKENIZER_CONFIG} and {TEMPLATE}"
        if tokenizer == BYTES
        else f"write the template to {folder}/{TEMPLATE}; that of a chat model of the same tokenizer will do",
    )
