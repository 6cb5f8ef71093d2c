"""ChatTemplate: chat messages -> the prompt's text, by a sandboxed Jinja template."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from jinja2.filters import do_format

from engine.errors import InvalidRequestError, ModelFileError

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MAX_RANGE = 100_000
_MAX_POWER = 64
_MAX_WIDTH = 1000
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*([0-9]{4}|\*)|\{[^}]*(:[^}]*([0-9]{4}|\{))")
_PADDING_METHODS = ("ljust", "rjust", "center", "zfill", "expandtabs")


class ChatTemplate:
    """A compiled chat template. `source_name` is named in errors. Raises ModelFileError for a syntax error.

    Templates come with models and requests, so they run in a sandbox with bounds on loops and output.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, source_name: str = "chat template"
    ) -> None:
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(f"{source_name}, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The prompt's text; `kwargs` are further variables of the template.

        Raises InvalidRequestError when the template refuses the messages, fails, or leaves its bounds.
        """
        variables: dict[str, object] = {
            **self.special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise _refused(f"the chat template's output exceeds {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except _RaisedByTemplateError as error:
            raise _refused(str(error)) from error
        except jinja2.exceptions.SecurityError as error:
            raise _refused(f"the chat template was stopped by the sandbox: {error}") from error
        except Exception as error:  # a template is foreign code: it can raise anything
            raise _refused(
                f"the chat template cannot render these messages: {error or type(error).__name__}"
            ) from error
        return "".join(pieces)


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


class _RaisedByTemplateError(Exception):
    """raise_exception(message) was called: the message is for the user."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on the operations that make much out of little."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if operator == "+":
            _check_length(_length(left) + _length(right))
        elif operator == "*":
            _check_length(_length(left) * right if isinstance(right, int) else 0)
            _check_length(_length(right) * left if isinstance(left, int) else 0)
        elif operator == "**" and isinstance(right, int | float) and abs(right) > _MAX_POWER:
            raise jinja2.exceptions.SecurityError(f"powers above {_MAX_POWER} are not allowed")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: object, attribute: str) -> object:
        return _bounded_method(obj, attribute, super().getattr(obj, attribute))

    def getitem(self, obj: object, argument: object) -> object:
        return _bounded_method(obj, argument, super().getitem(obj, argument))


def _bounded_method(obj: object, name: object, found: object) -> object:
    """A string's method, made to refuse great widths; anything else as it is."""
    if not isinstance(obj, str) or not callable(found):
        return found
    if name in ("format", "format_map"):
        _check_format(obj)
    return _bounded(found) if name in _PADDING_METHODS else found


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_length(length: int) -> None:
    if length > MAX_OUTPUT_CHARS:
        raise jinja2.exceptions.SecurityError(f"a text or list exceeds {MAX_OUTPUT_CHARS} elements")


def _check_widths(*args: object) -> None:
    if any(isinstance(arg, int) and arg > _MAX_WIDTH for arg in args):
        raise jinja2.exceptions.SecurityError(f"widths above {_MAX_WIDTH} are not allowed")


def _check_format(pattern: object) -> None:
    """Refuse a format that pads: widths of four digits, or taken from an argument."""
    if isinstance(pattern, str) and _WIDE_FORMAT.search(pattern):
        raise jinja2.exceptions.SecurityError(f"formats with widths above {_MAX_WIDTH} are not allowed")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model is trained on; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    filters = cast("dict[str, Callable[..., object]]", environment.filters)
    filters["tojson"] = _to_json
    for name in ("center", "indent"):
        filters[name] = _bounded(filters[name])
    filters["format"] = _bounded_format
    variables = cast("dict[str, object]", environment.globals)
    variables["raise_exception"] = _raise_exception
    variables["strftime_now"] = _strftime_now
    variables["range"] = _bounded_range
    variables.pop("lipsum", None)
    return environment


def _bounded(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        _check_widths(*args, *kwargs.values())
        return function(*args, **kwargs)

    return checked


def _bounded_format(pattern: str, *args: object, **kwargs: object) -> str:
    _check_format(pattern)
    return do_format(pattern, *args, **kwargs)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter: models were trained on plain JSON."""
    _check_widths(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _RaisedByTemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _bounded_range(*args: int) -> range:
    found = range(*args)
    if len(found) > MAX_RANGE:
        raise jinja2.exceptions.SecurityError(f"range() yields at most {MAX_RANGE} numbers")
    return found
