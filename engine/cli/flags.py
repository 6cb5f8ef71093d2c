"""The command line of engine-serve: argparse over the options, --config, and the table for the README."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

import engine
from engine.cli.config_file import read_config_file
from engine.cli.options import ALIASES, NONE, Option, all_options, build_config, closest, option_groups
from engine.config import EngineConfig
from engine.errors import ConfigError

PROGRAM = "engine-serve"

DESCRIPTION = "Serve a language model over an OpenAI-compatible HTTP interface."
KEY_VARIABLE = "ENGINE_API_KEY"
EPILOG = f"""Where a default is worked out at start, the value {NONE} means it too. Every flag may stand in the file of
--config under its own name (`port: 8000`); the command line wins. The environment variable {KEY_VARIABLE} is
--api-key where neither of them has it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.")


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """Arguments (without the program's name) -> configuration. Raises ConfigError; SystemExit after --help."""
    parsed, strange = build_parser().parse_known_args(argv)
    if strange:
        raise _unknown(strange[0])
    given = vars(parsed)
    values: dict[str, tuple[str, object]] = {}
    if (path := given.pop("config", None)) is not None:
        values.update(read_config_file(path))
    options = all_options()
    values.update({name: (options[name].flag, value) for name, value in given.items()})
    # A key without a value in the file is no decision to serve without one.
    if KEY_VARIABLE in environ and values.get("api_key", ("", None))[1] is None:
        values["api_key"] = (KEY_VARIABLE, environ[KEY_VARIABLE])
    return build_config(values)


def _unknown(argument: str) -> ConfigError:
    if not argument.startswith("-"):
        return ConfigError(f"Unexpected argument {argument[:100]!r}; options start with --.")
    word = argument.split("=", 1)[0]
    return ConfigError(f"Unknown flag {word[:100]!r}{closest(word, _all_flags())}", param=word)


def _all_flags() -> list[str]:
    flags = ["--config", "--help", "--version"]
    for option in all_options().values():
        flags += _spellings(option)
        if option.is_bool:
            flags.append(_negated(option))
    return flags


def build_parser() -> argparse.ArgumentParser:
    """Values stay text here: ranges and types are checked in one place, build_config."""
    parser = _Parser(
        prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {engine.__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML file with options; the command line wins over it.")
    for title, options in option_groups():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)
    return parser


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    text = f"{option.description} (default: {option.default_text})".replace("%", "%%")
    if option.is_bool:
        group.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
    elif option.choices:
        choices = (*option.choices, NONE) if option.takes_none else option.choices
        group.add_argument(option.flag, dest=option.name, type=option.spelled, choices=choices, help=text)
    else:
        metavar = option.name.rsplit("_", 1)[-1].upper()
        group.add_argument(*_spellings(option), dest=option.name, metavar=metavar, help=text)


def _spellings(option: Option) -> list[str]:
    others = ["--" + alias.replace("_", "-") for alias, name in ALIASES.items() if name == option.name]
    return [option.flag, *others]


def _negated(option: Option) -> str:
    return "--no-" + option.flag.removeprefix("--")


def flags_table() -> str:
    """Markdown: for each group a table of flag, default and meaning."""
    parts = []
    for title, options in option_groups():
        rows = ["| Flag | Default | Meaning |", "| --- | --- | --- |"]
        for option in options:
            flag = ", ".join(f"`{spelling}`" for spelling in _spellings(option))
            if option.is_bool:
                flag += f", `{_negated(option)}`"
            meaning = option.description
            if option.choices:
                meaning += " One of " + ", ".join(f"`{choice}`" for choice in option.choices) + "."
            default = option.auto if option.default is None else f"`{option.default_text}`"
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (flag, default, meaning)) + " |")
        parts.append(f"**{title}**\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)
