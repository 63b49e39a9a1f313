"""Small tokenizers with chat templates, and what they write, said again in Python: the slow and obvious way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>")  # fmt: skip
CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TAGGED = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endif %}
{% endfor %}
"""
LLAMA = """{{ bos_token }}{% for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
REWRITES = """{% for message in messages %}
{{- message['role'] + ': ' + (message['content'] if loop.last else message['content'] | upper) + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""Writes the last message in another way once others follow it, as templates do that leave out earlier reasoning."""
TEMPLATES = {"chatml": CHATML, "tagged": TAGGED, "llama": LLAMA}

Part = tuple[str, bool]
"""A part of a text, and whether the assistant says it."""


def parts(name: str, messages: list[dict[str, Any]]) -> list[Part]:
    """Text that a template writes."""
    found: list[Part] = [("<|begin_of_text|>", False)] if name == "llama" else []
    for message in messages:
        role, content = message["role"], message["content"]
        is_said = role == "assistant"
        if name == "llama":
            found += [(f"<|start_header_id|>{role}<|end_header_id|>\n\n", False)]
            found += [(content.strip() + "<|eot_id|>", is_said)]
        else:
            found += [(f"<|im_start|>{role}\n", False), (f"{content}<|im_end|>", is_said), ("\n", False)]
    return found


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE in a folder, and the bytes of each of its tokens."""

    folder: Path
    token_bytes: list[bytes]

    def mask(self, ids: list[int], expected: list[Part]) -> list[bool]:
        """Return which tokens have a byte that the assistant says; the bytes of all of them are the text."""
        is_said = [said for text, said in expected for _ in text.encode()]
        assert b"".join(self.token_bytes[i] for i in ids) == "".join(text for text, _ in expected).encode()
        found, first = [], 0
        for i in ids:
            last = first + len(self.token_bytes[i])
            found.append(any(is_said[first:last]))
            first = last
        return found


def build(folder: Path, template: str | None, *, in_config: bool = False) -> Tokenizer:
    """Write a tokenizer whose own rules add a begin-of-text token and leave white space out of offsets."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    text = ["user\n\nassistant\n\nsystem\n What is two and two? It is four. The quick brown fox; ä ö ü 漢字\n\n"]
    backend.train_from_iterator(text * 20, trainer)
    begin = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 3)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": None,
        "bos_token": {"__type": "AddedToken", "content": "<|begin_of_text|>"},
    }  # fmt: skip
    if template is not None and in_config:
        config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return Tokenizer(folder, _token_bytes(backend))


def _token_bytes(backend: Any) -> list[bytes]:
    # GPT-2's letters for bytes: printable ones stand for themselves, the others for 256 and on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    return [one.encode() if one in SPECIAL else bytes(letters[letter] for letter in one) for one in tokens]


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]


def write_lines(path: Path, chats: list[list[dict[str, Any]]], field: str = "messages") -> Path:
    """Write conversations as JSON lines."""
    path.write_text("".join(json.dumps({"id": n, field: one}) + "\n" for n, one in enumerate(chats)), "utf-8")
    return path


def many_chats(number: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of one to four turns, of very different lengths."""
    generator = np.random.default_rng(seed)
    words = ["What", "is", "two", "and", "it", "four.", "äö", "漢字", "fox\n", "\nThe", "🦊"]

    def text() -> str:
        return " ".join(generator.choice(words, size=int(generator.integers(1, 12))))

    return [chat(*(text() for _ in range(2 * int(generator.integers(1, 4)))), system="" if n % 3 == 0 else None)
            for n in range(number)]  # fmt: skip
