"""Wrong commands, options and arguments, as errors with location, rule and fix in place of typer's.

For a command or option that Meshwright doesn't have, the fix is the one of the same meaning."""

from __future__ import annotations

import difflib
import re
import shlex
import textwrap
from collections.abc import Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

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
        if not known:
            return unknown_option(option, path, parameters)
        return InputError(
            f"{option} has no value",
            where=f"command line, {option}",
            rule=f"{option}: {_help(known[0])}",
            fix=f"{option} {_example(known[0])}",
        )
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


COMMANDS: Mapping[str, str] = {
    "run": "train pretrain finetune fit sft start exec resume continue",
    "plan": "estimate estimate_memory simulate memory cost dryrun show explain",
    "prove": "verify validate test check compare parity",
    "presets": "list ls models configs config recipes",
    "evaluate": "eval score perplexity",
    "generate": "infer inference sample predict chat complete",
    "keys": "options settings flags search find",
    "doctor": "env info diagnose status",
    "bench": "benchmark benchmarks profile",
    "draw pipeline": "visualize plot schedule pipeline",
    "draw loss": "loss curves",
    "checkpoint import": "convert import convert_from_hf download",
    "checkpoint export": "export convert_to_hf",
    "checkpoint ls": "checkpoints",
    "presets llama-tiny > run.toml": "init new create",
    "--help": "help",
    "--version": "version",
}
"""Names of commands elsewhere, by ours."""


class Commands(OwnErrors, TyperGroup):
    """Group of commands that names the one to use for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Look up a command.

        Raises:
            InputError: there is no such command.
        """
        if " ".join(args[:2]) in self.commands:  # `prove script`, beside `prove PRESET`
            args = [" ".join(args[:2]), *args[2:]]
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            path = path_of_command(ctx.parent, ctx.info_name)
            raise _unknown_command(args, [*self.commands]) if ctx.parent is None else _unknown_part(args, self, path)
        return super().resolve_command(ctx, args)


def commands_of(module: str) -> type[Commands]:
    """Return the class of a group whose commands are those of a module's `app`, imported when they are asked for."""

    class Group(Commands):
        _found: MutableMapping[str, Any]

        @property
        def commands(self) -> MutableMapping[str, Any]:
            if not self._found:
                self._found = typer.main.get_group(import_module(module).app).commands
            return self._found

        @commands.setter
        def commands(self, own: MutableMapping[str, Any]) -> None:
            self._found = own

    return Group


class ConfigCommand(Command):
    """Command that takes overrides, also as options: `--steps 10` is train.steps=10.

    Options with another framework's name become overrides too, which the loader rejects by naming our key.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ignore_unknown_options = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments.

        Raises:
            InputError: an option is a misspelled one of this command.
        """
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("words")
        if words and any(word.startswith("-") for word in words):
            ctx.params["words"] = self._as_overrides(list(words), path_of_command(ctx.parent, ctx.info_name))
        return rest

    def _as_overrides(self, words: list[str], path: str) -> list[str]:
        """Return `words` with options as overrides after all others: of our key, or of the name given if it is none."""
        from meshwright.config.source import preset_names
        from meshwright.config.translate import option_named, own_key

        others, options = [], []
        while words:
            word = words.pop(0)
            if not word.startswith("-"):
                others.append(word)
                continue
            if own_key(word.partition("=")[0]) is None:
                self._check_misspelling(word.partition("=")[0], path)
            is_value = words and "=" not in words[0] and not words[0].startswith("--")
            if is_value and option_named(word) is None:
                is_value = words[0] not in preset_names() and not words[0].endswith(".toml")
            if "=" not in word:
                word = f"{word}={words.pop(0) if is_value else 'true'}"
            name, _, value = word.partition("=")
            options.append(f"{key}={value}" if (key := own_key(name)) else word)
        return others + options

    def _check_misspelling(self, name: str, path: str) -> None:
        from meshwright.config.translate import find_meaning, option_named

        own = [option for parameter in self.params for option in parameter.opts if option.startswith("--")]
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.7)
        if near and find_meaning(name) is None and option_named(name) is None:
            raise unknown_option(name, path, self.params)


def _unknown_part(args: list[str], group: TyperGroup, path: str) -> InputError:
    """Return the error for an unknown command of a group such as `draw`, with the nearest of its own."""
    word, own = args[0], [*group.commands]
    near = difflib.get_close_matches(word, own, n=1)
    return InputError(
        f"unknown command {word}",
        where=f"command line, {word}",
        rule=f"commands of {path} are {', '.join(own)}",
        fix=f"{path} {near[0]} {shlex.join(args[1:])}".rstrip() if near else f"{path} --help",
    )


def _unknown_command(args: list[str], own: list[str]) -> InputError:
    from meshwright.config.source import preset_names
    from meshwright.config.translate import normalize

    word, rest = args[0], shlex.join(args[1:])
    commands = {normalize(name): command for command, names in COMMANDS.items() for name in names.split()}
    if word in preset_names() or "=" in word or word.endswith(".toml"):
        command, rest = "run", shlex.join(args)
    else:
        near = difflib.get_close_matches(word, own, n=1)
        command = commands.get(normalize(word)) or next(iter(near), "--help")
    if command.split()[0] not in ("run", "plan", "prove", "bench"):
        rest = ""  # the words of other commands are different
    return InputError(
        f"unknown command {word}",
        where=f"command line, {word}",
        rule=f"commands are {', '.join(own)}",
        fix=f"meshwright {command} {rest}".rstrip(),
    )
