"""Check that no text is read by two sources of a run: that validation reads nothing that is trained on, and a mixture
no file twice. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations

from meshwright.data.sources.own_documents import is_own
from meshwright.data.sources.use import Use
from meshwright.data.text_documents import list_documents
from meshwright.data.token_files import is_token_file
from meshwright.errors import DataError
from meshwright.models.tasks.text_sources import RunSource
from meshwright.units import counted


def check_overlaps(sources: Sequence[RunSource]) -> None:
    """Check the sources of a run, which exist, pair by pair.

    Raises:
        DataError: two of them have a file in common; entries of a mixture may have one if they read different fields.
    """
    files = {one: _files(one.source) for one in sources} if len(sources) > 1 else {}
    for one, other in combinations(files, 2):
        common = sorted(files[one] & files[other])
        is_validation = other.use is Use.VALIDATION
        if not common or (not is_validation and one.text_field != other.text_field):
            continue
        more = f" and {counted(len(common) - 1, 'more file')}" if len(common) > 1 else ""
        if is_validation:
            what = f"{common[0]}{more} would be trained on, as {one.source}, and validated with"
            rule, fix = "what a run validates with is not trained on", f"{other.key} and {one.key} without common files"
        else:
            what = f"{common[0]}{more} would be read by {one.source} and by {other.source}"
            rule, fix = (
                "each file is of one source of a mixture, unless they read different fields",
                "one entry for both",
            )
        raise DataError(what, where=f"{other.key}, {other.source}", rule=rule, fix=fix)


def _files(source: str) -> frozenset[str]:
    """Return what a source reads: files by their paths, without links, or its name."""
    if is_own(source):
        return frozenset({source})
    if is_token_file(source) or os.path.isdir(source):
        return frozenset({os.path.realpath(source)})
    return frozenset(os.path.realpath(document.path) for document in list_documents(source))
