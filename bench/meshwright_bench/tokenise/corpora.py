"""Corpora of any size, of the standard library's source, and a tokenizer trained on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshwright.data.text_documents import STDLIB, list_documents

VOCAB_SIZE = 32_000


class Kind(StrEnum):
    """Files of a corpus."""

    FILES = "files"
    JSON_LINES = "json_lines"
    ONE_FILE = "one_file"


def write_corpus(kind: Kind, folder: Path, num_chars: int) -> tuple[str, str | None]:
    """Write a corpus of at least `num_chars` characters; return its `data.source` and `data.text_field`."""
    folder.mkdir()
    found = _texts(num_chars)
    if kind is Kind.FILES:
        for number, text in enumerate(found):
            (folder / f"{number:06}.txt").write_text(text, "utf-8")
        return f"{folder}/*.txt", None
    if kind is Kind.JSON_LINES:
        _write_lines(folder / "corpus.jsonl", (json.dumps({"text": text}) + "\n" for text in found))
        return f"{folder}/corpus.jsonl", "text"
    _write_lines(folder / "corpus.txt", found)
    return f"{folder}/corpus.txt", None


def train_tokenizer(path: Path) -> None:
    """Train a byte-level BPE, as GPT-2's is, on a third of the standard library."""
    import tokenizers

    backend: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_stdlib()[::3], trainer)
    backend.save(str(path))


def _stdlib() -> list[str]:
    found = []
    for one in list_documents(STDLIB):
        with suppress(UnicodeDecodeError):
            found.append(Path(one.path).read_text("utf-8-sig"))
    return [text for text in found if text and "\0" not in text]


def _texts(num_chars: int) -> Iterator[str]:
    """Yield the standard library again and again; a number in front makes each text another one."""
    texts, round_number = _stdlib(), 0
    while True:
        round_number += 1
        for text in texts:
            numbered = f"# {round_number}\n{text}"
            yield numbered
            num_chars -= len(numbered)
            if num_chars <= 0:
                return


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines)
