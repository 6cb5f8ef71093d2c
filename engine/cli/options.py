"""Every option of EngineConfig as one row: flag, type, range, default, meaning. Flags, YAML and docs read from here."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import inspect

from engine.config import EngineConfig
from engine.errors import ConfigError

ALIASES = {"model_path": "model", "tokenizer_path": "tokenizer"}
"""Names SGLang's users type where the meaning is the same."""

SECRETS = frozenset({"api_key"})
"""Options whose values no message quotes."""

NONE = "none"
"""On the command line, the word for `as if not given` where the default is worked out at start."""

_VISIBLE = re.compile(r"[\x21-\x7e]+")
"""What a header carries unchanged."""


class Option(msgspec.Struct, frozen=True):
    """One option. `auto` is what None stands for; choices are () unless the type is a Literal."""

    name: str
    group: str
    type: inspect.Type
    takes_none: bool
    default: str | int | float | bool | None
    auto: str
    description: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        return isinstance(self.type, inspect.BoolType)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(value) for value in self.type.values) if isinstance(self.type, inspect.LiteralType) else ()

    def spelled(self, value: str) -> str:
        """The choice that differs from a word in upper and lower case only, or the word."""
        return next((choice for choice in self.choices if choice.lower() == value.lower()), value)

    @property
    def default_text(self) -> str:
        """The default as help and docs show it."""
        if self.default is None:
            return self.auto
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def expected(self) -> str:
        """What a value must be, for error messages."""
        kind = self.type
        if isinstance(kind, inspect.BoolType):
            return "true or false"
        if isinstance(kind, inspect.LiteralType):
            text = f"one of {', '.join(self.choices)}"
        elif isinstance(kind, inspect.IntType):
            text = "an integer" + _range(kind)
        elif isinstance(kind, inspect.FloatType):
            text = "a finite number" + _range(kind)
        elif self.name in SECRETS:
            text = "text of visible ASCII characters"
        elif isinstance(kind, inspect.StrType) and kind.min_length:
            text = "text that is not empty"
        else:
            text = "text"
        return f"{text}, or {NONE}" if self.takes_none else text


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge:g} to {kind.le:g}"
    bounds = [
        f" {word} {bound:g}"
        for word, bound in (
            ("of at least", kind.ge),
            ("above", kind.gt),
            ("of at most", kind.le),
            ("below", kind.lt),
        )
        if bound is not None
    ]
    return " and".join(bounds)


def all_options() -> dict[str, Option]:
    """Name -> option, in the order of the groups of EngineConfig."""
    return {option.name: option for _, options in option_groups() for option in options}


def option_groups() -> list[tuple[str, list[Option]]]:
    """(what the group is about, its options) for each group."""
    config = inspect.type_info(EngineConfig)
    assert isinstance(config, inspect.StructType)
    defaults = EngineConfig().flat()
    groups = []
    for group in config.fields:
        assert isinstance(group.type, inspect.StructType)
        title = (group.type.cls.__doc__ or group.name).strip().rstrip(".")
        groups.append((title, [_option(group.name, field, defaults[field.name]) for field in group.type.fields]))
    return groups


def _option(group: str, field: inspect.Field, default: str | int | float | bool | None) -> Option:
    kind, description, auto = field.type, "", NONE
    while isinstance(kind, inspect.Metadata):
        description = (kind.extra_json_schema or {}).get("description", description)
        auto = (kind.extra or {}).get("auto", auto)
        kind = kind.type
    takes_none = False
    if isinstance(kind, inspect.UnionType):
        takes_none = True
        (kind,) = (member for member in kind.types if not isinstance(member, inspect.NoneType))
    return Option(field.name, group, kind, takes_none, default, auto, description)


def build_config(values: Mapping[str, tuple[str, object]]) -> EngineConfig:
    """The configuration from option name -> (where the value comes from, value). Raises ConfigError naming both."""
    options = all_options()
    groups: dict[str, dict[str, object]] = {group: {} for group in EngineConfig.__struct_fields__}
    hints = {group: type(getattr(EngineConfig(), group)) for group in groups}
    for name, (source, value) in values.items():
        option = options[name]
        value = _plain(option, value)
        try:
            struct = msgspec.convert({name: value}, hints[option.group], strict=False)
        except msgspec.ValidationError:
            raise _refusal(option, source, value) from None
        result = getattr(struct, name)
        if isinstance(result, float) and not math.isfinite(result):
            raise _refusal(option, source, value)
        if name in SECRETS and result is not None and not _VISIBLE.fullmatch(result):
            raise _refusal(option, source, value)
        groups[option.group][name] = result
    return EngineConfig(**{group: hints[group](**chosen) for group, chosen in groups.items()})


def _plain(option: Option, value: object) -> object:
    if option.takes_none and value == NONE:
        return None
    if value is None and "null" in option.choices:
        return "null"  # YAML reads the bare word as nothing
    return option.spelled(value) if isinstance(value, str) else value


def _refusal(option: Option, source: str, value: object) -> ConfigError:
    if option.name in SECRETS:
        return ConfigError(f"{source} must be {option.expected}.", param=option.name)
    shown = repr(value) if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return ConfigError(f"{source} is {shown[:100]}; it must be {option.expected}.", param=option.name)


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` or nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else "."
