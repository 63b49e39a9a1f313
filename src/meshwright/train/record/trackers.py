"""Trackers of a run: sinks selected by `train.trackers`, checked before processes start and called on rank 0.

Torch-free; TensorBoard's sink, which imports torch, is imported by name on rank 0.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.config.resolve import TRACKER_RULE, TRACKERS, replace_tracker
from meshwright.errors import ConfigError, InputError
from meshwright.log import get_logger
from meshwright.settings.import_object import import_object, raised
from meshwright.settings.violation import format_fix
from meshwright.train.record.sink import RunInfo, Sink

SINKS = {
    "tensorboard": "meshwright.train.record.sink:TensorBoardSink",
    "wandb": "meshwright.train.record.sink:WandbSink",
    "trackio": "meshwright.train.record.sink:TrackioSink",
}
"""Built-in sinks by name, which is also the name of the package and of the extra."""
METHODS = {"start": ("run",), "log": ("step", "values"), "close": ("failed",)}
DEFINE = "define start(run), log(step, values) and close(failed)"
SLOW_SHARE, SLOW_S = 0.1, 5.0
"""Share of a run's time that a sink takes, and its seconds in total, from which there is a warning."""

_log = get_logger(__name__)


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers can be imported, without starting any.

    Raises:
        InputError: a tracker's package is not installed.
        ConfigError: a module can't be imported, or what it has is not a sink.
    """
    for name in names:
        _find_factory(name, names)


class Trackers:
    """Sinks of a run on rank 0. One that raises is reported once, and left out of the rest of the run."""

    def __init__(self, names: Sequence[str], run: RunInfo) -> None:
        """Make and start the sinks.

        Raises:
            InputError: as for `check_trackers`; also if a function of the user's returns something else than a sink.
        """
        self._sinks: dict[str, Sink] = {}
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        for name in dict.fromkeys(names):
            factory = _find_factory(name, names)
            try:
                sink = factory()
            except Exception as error:
                _warn(name, "can't be made", error)
                continue
            _check_methods(name, sink)
            self._sinks[name] = sink
        for name in tuple(self._sinks):
            self._call(name, "start", run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the metrics of a step to all sinks."""
        for name in tuple(self._sinks):
            begin = time.perf_counter()
            self._call(name, "log", step, values)
            self._check_speed(name, begin)

    def image(self, step: int, name: str, path: Path) -> None:
        """Pass an image file to the sinks that take images."""
        self._call_if_able("image", step, name, path)

    def text(self, step: int, name: str, text: str) -> None:
        """Pass a text to the sinks that take texts."""
        self._call_if_able("text", step, name, text)

    def close(self, *, failed: bool) -> None:
        """Close all sinks, once."""
        for name in tuple(self._sinks):
            self._call(name, "close", failed)
        self._sinks.clear()

    def _call_if_able(self, method: str, *args: Any) -> None:
        for name, sink in tuple(self._sinks.items()):
            if callable(getattr(sink, method, None)):
                self._call(name, method, *args)

    def _call(self, name: str, method: str, *args: Any) -> None:
        try:
            getattr(self._sinks[name], method)(*args)
        except Exception as error:
            del self._sinks[name]
            _warn(name, f"failed in {method}", error)

    def _check_speed(self, name: str, begin: float) -> None:
        now = time.perf_counter()
        before = self._seconds.get(name, 0.0)
        seconds = self._seconds[name] = before + now - begin
        if before < SLOW_S <= seconds and seconds > SLOW_SHARE * (now - self._started):
            share = seconds / (now - self._started)
            _log.warning(
                "the tracker %s has taken %.0f %% of the run's time: training waits for its log(), which should hand "
                "slow work to a thread",
                name,
                100 * share,
            )


def _warn(name: str, what: str, error: Exception) -> None:
    at = traceback.extract_tb(error.__traceback__)[-1]
    _log.warning(
        "the tracker %s %s and is left out of the rest of the run, which metrics.jsonl has in full: %s (%s:%s)",
        name, what, raised(error), at.filename, at.lineno,
    )  # fmt: skip


def _find_factory(name: str, names: Sequence[str]) -> Callable[[], Any]:
    """Return the class or function that makes a sink; a built-in sink is not imported yet."""

    def format_setting(other: str) -> str:
        return format_fix({TRACKERS: replace_tracker(tuple(names), name, other)})

    if name in SINKS:
        _check_installed(name, names)
        return lambda: import_object(SINKS[name], key=TRACKERS, rule=TRACKER_RULE, format_setting=format_setting)()
    found: Callable[[], Any] = import_object(name, key=TRACKERS, rule=TRACKER_RULE, format_setting=format_setting)
    if not callable(found):
        raise _not_a_sink(f"{name} is not a class or function: {found!r:.60}", "name the class of the sink")
    if isinstance(found, type):
        _check_methods(name, found)
    if (why := _why_uncallable(found)) is not None:
        fix = "give its parameters defaults, or name a function that makes the sink"
        raise _not_a_sink(f"{name} can't be called without arguments: {why}", fix)
    return found


def _why_uncallable(function: Callable[..., Any], *arguments: str) -> str | None:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass  # some built-in classes don't tell their parameters
    return None


def _check_installed(name: str, names: Sequence[str]) -> None:
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # a folder of this name, as wandb leaves, is found as a namespace
        others = format_fix({TRACKERS: replace_tracker(tuple(names), name)})
        raise InputError(
            f"{name} is not installed",
            where=TRACKERS,
            rule=f"the tracker {name} requires the package {name}",
            fix=f"pip install {name}, or {others}",
        )


def _check_methods(name: str, found: Any) -> None:
    abstract = getattr(found, "__abstractmethods__", ())
    missing = [method for method in METHODS if method in abstract or not callable(getattr(found, method, None))]
    is_class = isinstance(found, type)
    if missing:
        what = f"{name} lacks {', '.join(missing)}" if is_class else f"{name}() returned {found!r:.60}"
        raise _not_a_sink(what, DEFINE)
    for method, arguments in METHODS.items():
        own = ("self",) if is_class and inspect.isfunction(inspect.getattr_static(found, method, None)) else ()
        if (why := _why_uncallable(getattr(found, method), *own, *arguments)) is not None:
            raise _not_a_sink(f"{name}.{method} can't be called with {' and '.join(arguments)}: {why}", DEFINE)


def _not_a_sink(what: str, fix: str) -> ConfigError:
    rule = "a sink has the methods of meshwright.train.record.sink.Sink, and its class needs no arguments"
    return ConfigError(what, where=TRACKERS, rule=rule, fix=fix)
