"""Commands and options that Meshwright doesn't have: suggestions by meaning in place of typer's usage errors."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from typing import Any

from typer.core import TyperGroup

from meshwright.cli.usage_errors import Command, OwnErrors, path_of_command, unknown_option
from meshwright.errors import InputError

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
