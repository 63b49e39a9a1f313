"""Wrong options and arguments of any command, as errors with location, rule and fix in place of typer's."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from meshwright.errors import InputError

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of the parser's errors, which versions of typer define in different modules."""
SHOWS_HELP = "NoArgsIsHelpError"
"""Name of the one that is a help page."""


MAX_HELP = 160


class OwnErrors:
    """Mixin for commands and groups whose usage errors are `InputError`s."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse arguments.

        Raises:
            InputError: an option or argument is unknown, missing or invalid.
        """
        given = list(args)
        try:
            return super().make_context(info_name, args, parent=parent, **extra)  # type: ignore[misc]
        except UsageError as error:
            if type(error).__name__ == SHOWS_HELP:
                raise
            raise _input_error(error, self, path_of_command(parent, info_name), given) from None


class Command(OwnErrors, TyperCommand):
    """Command whose usage errors are `InputError`s."""


def path_of_command(parent: Any, name: str | None) -> str:
    """Return a command as a user types it: `meshwright draw pipeline`."""
    names: list[str] = [name] if parent is not None and name else []
    while parent is not None and parent.parent is not None:
        names.insert(0, parent.info_name)
        parent = parent.parent
    return " ".join(["meshwright", *names])


def unknown_option(option: str, command: str, parameters: Sequence[Any]) -> InputError:
    """Return the error for an option that a command does not have, with the nearest that it has."""
    own = [name for parameter in parameters for name in parameter.opts if name.startswith("--")]
    near = difflib.get_close_matches(option, own, n=1, cutoff=0.7)
    return InputError(
        f"unknown option {option}",
        where=f"command line, {option}",
        rule=f"options of {command} are {', '.join(own)}" if own else f"{command} has no options",
        fix=near[0] if near else f"{command} --help",
    )


def _input_error(error: Any, command: Any, path: str, args: Sequence[str]) -> InputError:
    option, parameter = getattr(error, "option_name", None), getattr(error, "param", None)
    parameters = command.params
    if option is not None:
        known = [one for one in parameters if option in one.opts]
        return _without_value(option, known[0]) if known else unknown_option(option, path, parameters)
    if parameter is None:
        extra = re.search(r"\(([^()]*)\)$", str(error))
        return InputError(
            f"unexpected argument {extra[1]}" if extra else str(error).rstrip("."),
            where="command line",
            rule=f"usage: {_usage(path, parameters)}",
            fix=f"{path} --help",
        )
    name = _name(parameter)
    if not str(error.message):
        return InputError(
            f"missing {parameter.param_type_name} {name}",
            where="command line",
            rule=f"{name}: {_help(parameter)}",
            fix=_usage(path, parameters),
        )
    value = _value(parameter, args)
    return InputError(
        f"{name} {value}".rstrip() + " is not allowed",
        where=f"command line, {name}",
        rule=f"{_expected(str(error.message))} ({_lower(_help(parameter))})",
        fix=f"{name} {_example(parameter)}",
    )


def _without_value(option: str, parameter: Any) -> InputError:
    return InputError(
        f"{option} has no value",
        where=f"command line, {option}",
        rule=f"{option}: {_help(parameter)}",
        fix=f"{option} {_example(parameter)}",
    )


def _usage(path: str, parameters: Sequence[Any]) -> str:
    """Return a command with its required parameters."""
    needed = [one for one in parameters if one.required]
    arguments = [_name(one) for one in needed if one.param_type_name == "argument"]
    options = [f"{_name(one)} {_example(one)}" for one in needed if one.param_type_name == "option"]
    return " ".join([path, *arguments, *options])


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return next((str(name) for name in parameter.opts if name.startswith("--")), str(parameter.opts[0]))


def _example(parameter: Any) -> str:
    """Return a value for an option: its default, the one that its help gives, or its placeholder."""
    if parameter.default is not None and not parameter.required:
        return str(parameter.default)
    if given := re.search(r"such as (\S+?)[.,;]?(?: |$)", parameter.help):
        return given[1]
    return str(parameter.metavar or parameter.name.upper().removesuffix("_PATH"))


def _value(parameter: Any, args: Sequence[str]) -> str:
    """Return what was given for an option."""
    for word, after in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in parameter.opts:
            return value if equals else after
    return ""


def _help(parameter: Any) -> str:
    return textwrap.shorten(parameter.help.rstrip("."), MAX_HELP, placeholder=" …")


def _expected(message: str) -> str:
    """Return what typer says of a value, without what pydantic adds."""
    return _lower(message.removeprefix("Value error, ").partition(", unable to")[0].rstrip("."))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
