"""Answer a name on the Hugging Face Hub with the command that downloads it: nothing here does."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"(?!runs/)\w[\w.-]*/(\w[\w.-]*)")  # runs/ has the runs of commands that don't say where
_FILE = re.compile(r"\.(?!\d)\w{1,7}$")  # the end of `Qwen3-0.6B` is no suffix


def download_fix(text: str, use: str, *, kind: str = "") -> str | None:
    """Return the command that downloads what `text` names and what to do then, or None if it looks like a path.

    Args:
        text: what was given in place of a file or folder that exists.
        use: what to do with the folder, which stands for `{}`, such as `model.config={}`.
        kind: options of the command, such as `--repo-type dataset`.
    """
    name = _NAME.fullmatch(text)
    if name is None or _FILE.search(text) or Path(text).parent.is_dir():  # otherwise a typing error in a path
        return None
    command = f"hf download {text}{kind and f' {kind}'} --local-dir {name[1]}"
    return f"{command} (after hf auth login, if it is gated), then {use.format(name[1])}"
