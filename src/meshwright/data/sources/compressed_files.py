"""Compressed files, read as what they hold: `a.jsonl.gz` is JSON lines and `b.txt.xz` text.

Zstandard isn't in Python's library before 3.14: the optional `pyarrow` package, which comes with `datasets`, reads it.
"""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import io
import lzma
import os
import shlex
import zlib
from collections.abc import Callable
from typing import Any, cast

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


def recode(path: str, encoding: str = "<its encoding>") -> str:
    """Return the commands that write a file of text in UTF-8 to another, which unpack it first if it is compressed."""
    suffix = suffix_of_compression(path)
    first = f"{UNPACK[suffix]} {shlex.quote(path)}, then " if suffix else ""
    return f"{first}iconv -f {encoding} -t UTF-8 {shlex.quote(contents_name(path))} > <another file>"


def open_contents(path: str) -> io.BufferedReader:
    """Open a file to read what it holds, decompressed as it is read.

    Raises:
        DataError: it is compressed by Zstandard, and `pyarrow` isn't installed.
    """
    suffix = suffix_of_compression(path)
    if suffix == ".zst":
        require_datasets(path, package="pyarrow", purpose="a .zst file")
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(path, compression="zstd"))
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(io.BufferedReader, openers.get(suffix, open)(path, "rb"))  # all of them can peek


def require_datasets(source: str, *, package: str, purpose: str) -> None:
    """Raise a DataError if a package that comes with the extra `datasets` is not installed.

    Args:
        source: `data.source`, for the message.
        package: pyarrow or datasets.
        purpose: what is read with it, such as `a Parquet file`.
    """
    if importlib.util.find_spec(package) is None:
        raise DataError(
            f"the {package} package is not installed",
            where=f"data.source, {source}",
            rule=f"reading {purpose} requires the {package} package",
            fix=f"pip install {package}",
        )
