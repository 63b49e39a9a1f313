"""Find the chat template of a tokenizer, and its special tokens, in its folder in Hugging Face's format. Torch-free.

As `transformers` reads them: `chat_template.jinja` before `tokenizer_config.json`, in which a template is a text or a
list of named ones, of which `default` is that of conversations.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.tokenise.special_tokens import TOKENIZER_CONFIG, TOKENS_MAP, read_json, read_text, token_text
from meshwright.data.tokenizer import BYTES, tokenizer_path
from meshwright.errors import DataError

TEMPLATE = "chat_template.jinja"
OLDER_TEMPLATE = "chat_template.json"
RULE = "conversations are written by the chat template of the tokenizer"
_DEFAULT = "default"
_TOKEN = "_token"
"""Endings of the names of special tokens: `bos_token`, `eos_token`, and those of one model."""


@dataclass(frozen=True)
class TemplateFiles:
    """A chat template as its tokenizer's files have it.

    Args:
        path: the tokenizer's `tokenizer.json`.
        template_path: the file that has the template.
        template: its text, in Jinja's language.
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
        rule=RULE,
        fix=f"data.tokenizer=<the folder of a model's tokenizer>, with {TOKENIZER_CONFIG} and {TEMPLATE}"
        if tokenizer == BYTES
        else f"write the template to {folder}/{TEMPLATE}; that of a chat model of the same tokenizer will do",
    )
