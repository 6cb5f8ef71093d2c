"""JsonFile: a JSON object that knows its file, so that every complaint names file, key and expectation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object. The getters take alternative keys, the first that is present and not null counts."""

    path: Path
    data: Mapping[str, object]

    def get(self, *keys: str) -> object:
        """The value under the first present key, or None."""
        return next((self.data[key] for key in keys if self.data.get(key) is not None), None)

    def has(self, key: str) -> bool:
        """Whether the file states the key, null included."""
        return key in self.data

    def section(self, key: str) -> JsonFile:
        """The object under `key`; an empty one where it is missing."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        return JsonFile(self.path, value)

    def natural(self, *keys: str, default: int | None = None) -> int:
        """An integer of at least zero."""
        value = self._get(keys, "an integer", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(keys[0], "an integer of at least 0", value)
        return value

    def positive(self, *keys: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(keys, "a positive integer", default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(keys[0], "a positive integer", value)
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """A number, as float."""
        value = self._get(keys, "a number", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(keys[0], "a number", value)
        return float(value)

    def boolean(self, *keys: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._get(keys, "true or false", default)
        if not isinstance(value, bool):
            raise self.error(keys[0], "true or false", value)
        return value

    def string(self, *keys: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(keys, "a string", default)
        if not isinstance(value, str):
            raise self.error(keys[0], "a string", value)
        return value

    def error(self, key: str, expected: str, value: object) -> ModelFileError:
        """The error to raise when `key` holds `value` instead of what is expected."""
        shown = "it is missing" if value is None else f"not {value!r:.80}"
        return ModelFileError(f"{self.path}: {key} must be {expected}, {shown}")

    def _get(self, keys: tuple[str, ...], expected: str, default: object) -> object:
        value = self.get(*keys)
        if value is None:
            value = default
        if value is None:
            raise self.error(" or ".join(keys), expected, None)
        return value


def read_json(path: Path) -> JsonFile:
    """Read a file that must hold one JSON object. Raises ModelFileError."""
    try:
        data = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise ModelFileError(f"{path}: JSON that is nested too deeply") from error
    if not isinstance(data, dict):
        raise ModelFileError(f"{path}: must hold a JSON object, not {type(data).__name__}")
    return JsonFile(path, data)
