"""Names of what isn't ours: objects of the user's own code, `package.module:Name`, and repositories of the Hub."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, MeshwrightError

OBJECT_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Form of the name of an object in the user's code."""


def import_object(path: str, *, key: str, rule: str, format_setting: Callable[[str], str]) -> Any:
    """Import the object that a configuration key names.

    Args:
        path: `package.module:Name`.
        key: dotted key, for errors.
        rule: the key's rule, for errors.
        format_setting: formats the override that names another object in place of this one.

    Raises:
        ConfigError: the module can't be imported, or has no such object.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except MeshwrightError:
        raise
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or "\0")
        what = f"module not found: {module_name}" if missing else f"importing {module_name} failed: {error!r}"
        fix = "install the package, or add its folder to PYTHONPATH" if missing else f"python -c 'import {module_name}'"
        raise ConfigError(what, where=key, rule=rule, fix=fix) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1, cutoff=0.0)
        fix = format_setting(f"{module_name}:{near[0] if near else 'Name'}")
        raise ConfigError(f"{module_name} has no {name}", where=key, rule=rule, fix=fix)
    return getattr(module, name)


def raised(error: Exception) -> str:
    """Return what the user's code raised, with the nearest fields if it asked one of our values for another."""
    value = type(getattr(error, "obj", None))
    fields = getattr(value, "model_fields", None) or getattr(value, "__dataclass_fields__", ())
    if not (isinstance(error, AttributeError) and fields):
        return repr(error)
    return f"{error!r} (it has {', '.join(difflib.get_close_matches(str(error.name), fields, n=7, cutoff=0.0))})"


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
