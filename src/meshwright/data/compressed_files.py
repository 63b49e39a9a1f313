"""Compressed files, read as what they hold: `a.jsonl.gz` is JSON lines and `b.txt.xz` text. Torch-free.

Zstandard isn't in Python's library before 3.14: the optional `pyarrow` package, which comes with `datasets`, reads it.
"""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import io
import lzma
import os
import zlib
from typing import BinaryIO, cast

from meshwright.errors import DataError

UNPACK = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd"}
"""Commands that decompress files of these suffixes."""
DAMAGE = (EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises, besides an OSError without a number."""


def suffix_of_compression(path: str) -> str:
    """Return the suffix by which a file is compressed; empty if it isn't."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix if suffix in UNPACK else ""


def contents_name(path: str) -> str:
    """Return the path of a file without the suffix by which it is compressed."""
    return path[: len(path) - len(suffix_of_compression(path))]


def open_contents(path: str) -> BinaryIO:
    """Open a file to read what it holds, decompressed as it is read.

    Raises:
        DataError: it is compressed by Zstandard, and `pyarrow` isn't installed.
    """
    suffix = suffix_of_compression(path)
    if suffix == ".zst":
        return _open_zstandard(path)
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(suffix, open)(path, "rb"))


def _open_zstandard(path: str) -> BinaryIO:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(
            "the pyarrow package is not installed",
            where=f"data.source, {path}",
            rule="reading a .zst file requires the pyarrow package",
            fix="pip install 'meshwright[datasets]'",
        )
    import pyarrow as pa

    return cast(BinaryIO, io.BufferedReader(pa.input_stream(path, compression="zstd")))
