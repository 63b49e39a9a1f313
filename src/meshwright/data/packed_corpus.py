"""Both splits of a corpus with their documents packed into windows."""

from __future__ import annotations

from dataclasses import replace

from meshwright.data.packed_windows import PackedSplits, PackedWindows, open_packed
from meshwright.data.text_corpus import Corpus, SplitSource, split_source
from meshwright.errors import DataError
from meshwright.units import counted

WARNING = "warning:"
"""Beginning of lines of a description that proofs show, too."""


def pack_corpus(corpus: Corpus, *, seq_len: int, cache_dir: str | None, multiple_of: int = 1) -> Corpus:
    """Return the corpus with its documents packed into windows of `seq_len` tokens.

    Args:
        corpus: a corpus opened with its documents.
        seq_len: tokens in a window.
        cache_dir: directory of the cached index.
        multiple_of: divisor required of the suggested `seq_len`, for example the number of ranks that shard it.

    Raises:
        DataError: a split has fewer targets than a window, of which the fix names the largest `train.seq_len` that
            works; or, of conversations, none at all.
    """
    train_documents, validation_documents = corpus.train_documents, corpus.validation_documents
    assert train_documents is not None and validation_documents is not None, "open it with its documents"
    train = open_packed(corpus.train, train_documents, seq_len=seq_len, cache_dir=cache_dir, mask=corpus.train_mask)
    validation = open_packed(
        corpus.validation, validation_documents, seq_len=seq_len, cache_dir=cache_dir, mask=corpus.validation_mask
    )
    lines = [corpus.description, *_describe(train, len(train_documents.ends))]
    if corpus.conversations is not None and (chat := corpus.conversations.source.chat) is not None:
        if chat.turn_end is not None:
            lines.append(f"turns of the assistant end with {chat.turn_end.text}")
        else:
            lines.append(
                f"{WARNING} no token that counts in the loss ends the turns of the assistant, so that generation won't "
                "stop: write one, such as the tokenizer's eos_token, inside the turn in "
                f"{chat.files.template_path}"
            )
    splits = {"training": train, "validation": validation}
    for name in sorted(splits, key=lambda name: splits[name].num_inputs):
        _check_split(splits[name], split_source(corpus, name), name, seq_len=seq_len, multiple_of=multiple_of)
    return replace(corpus, description="\n  ".join(lines), packed=PackedSplits(train, validation))


def packed_splits(corpus: Corpus) -> PackedSplits:
    """Return the windows of packed documents of both splits of a packed corpus."""
    assert corpus.packed is not None, "the corpus is not packed"
    return corpus.packed


def _describe(train: PackedWindows, num_documents: int) -> list[str]:
    """Say what packing is worth, as padding costs as much as tokens; and what of conversations counts."""
    alone = train.num_inputs / max(1, len(train.pieces) * train.seq_len)
    if train.mask is None:
        return [
            f"documents packed: {train.fill:.1%} of the tokens in samples have a target, "
            f"{alone:.1%} with a document per sample"
        ]
    lines = [
        f"conversations packed: {train.num_targets / max(1, train.num_inputs):.0%} of tokens count in the loss; "
        f"{1 - train.fill:.1%} of samples is padding, {1 - alone:.1%} with a conversation per sample"
    ]
    if train.num_split:
        lines.append(
            f"longer than train.seq_len = {train.seq_len}, and split: {train.num_split:,} of "
            f"{counted(num_documents, 'conversation')}; left out: "
            f"{counted(train.num_left_out, 'piece')} without a token that counts"
        )
    return lines


def _check_split(windows: PackedWindows, source: SplitSource, name: str, *, seq_len: int, multiple_of: int) -> None:
    """Check that a split has enough targets to fill a window, or some, if not all tokens count."""
    if windows.mask is not None:
        if windows.num_windows:
            return
        raise DataError(
            f"no token of the {name} split counts in the loss",
            where=f"{source.key}, {source.name}",
            rule="the training and validation splits each have conversations in which the assistant says something",
            fix=f"a larger {source.key}",
        )
    fewest = windows.num_inputs
    if fewest >= seq_len:
        return
    largest = fewest // multiple_of * multiple_of
    raise DataError(
        f"train.seq_len = {seq_len} is longer than the {name} split, whose documents have {counted(fewest, 'target')}",
        where=f"train.seq_len; {source.key}, {source.name}",
        rule="with data.packing = documents, the training and validation splits each fill at least one sample; each "
        "token of a document but the first is a target",
        fix=f"train.seq_len={largest}, or a larger {source.key}" if largest else f"a larger {source.key}",
    )
