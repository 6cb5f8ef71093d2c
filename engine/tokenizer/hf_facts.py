"""What a HF model directory says about its tokenizer beside the vocabulary: special tokens, template, BOS and EOS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelFileError
from engine.model_files.json_file import JsonFile, read_json

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An entry of added_tokens_decoder."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool


@dataclass(frozen=True, slots=True)
class HfFacts:
    """The JSON files beside the vocabulary, read. `adds_bos` and `adds_eos` are None where no file decides."""

    special_tokens: dict[str, str]
    chat_template: str | None
    added_tokens: tuple[AddedToken, ...]
    adds_bos: bool | None
    adds_eos: bool | None

    def id_of(self, name: str, look_up: Callable[[str], int | None]) -> int | None:
        """The id of the token a name such as `eos_token` stands for."""
        text = self.special_tokens.get(name)
        return None if text is None else look_up(text)


def read_hf_facts(directory: Path) -> HfFacts:
    """Read tokenizer_config.json, special_tokens_map.json, added_tokens.json and chat_template.*, all optional."""
    config = _optional_json(directory / "tokenizer_config.json")
    named = _optional_json(directory / "special_tokens_map.json")
    special_tokens = {}
    for name in NAMES:
        text = _token_text(config.get(name)) or _token_text(named.get(name))
        if text is not None:
            special_tokens[name] = text
    adds_bos = config.get("add_bos_token")
    adds_eos = config.get("add_eos_token")
    # Where one of the two is given, the reference implementation takes a missing other one as false.
    decided = isinstance(adds_bos, bool) or isinstance(adds_eos, bool)
    return HfFacts(
        special_tokens=special_tokens,
        chat_template=_chat_template(directory, config),
        added_tokens=_added_tokens(directory, config),
        adds_bos=bool(adds_bos) if decided else None,
        adds_eos=bool(adds_eos) if decided else None,
    )


def _optional_json(path: Path) -> JsonFile:
    return read_json(path) if path.is_file() else JsonFile(path, {})


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _chat_template(directory: Path, config: JsonFile) -> str | None:
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{jinja}: cannot be read: {error}") from error
    template = config.get("chat_template") or _optional_json(directory / "chat_template.json").get("chat_template")
    if template is None or isinstance(template, str):
        return template
    by_name: dict[str, str] = {}
    if isinstance(template, list):
        for entry in template:
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                by_name[str(entry.get("name"))] = entry["template"]
    if not by_name:
        raise config.error("chat_template", "a string or a list of {name, template}", template)
    return by_name.get("default") or next(iter(by_name.values()))


def _added_tokens(directory: Path, config: JsonFile) -> tuple[AddedToken, ...]:
    found: dict[int, AddedToken] = {}
    for text, id in _optional_json(directory / "added_tokens.json").data.items():
        if isinstance(id, int):
            found[id] = AddedToken(id, text, False, False, False, False, False)
    decoder = config.section("added_tokens_decoder").data
    for key, value in decoder.items():
        text = _token_text(value)
        if not key.isdecimal() or text is None or not isinstance(value, Mapping):
            raise config.error("added_tokens_decoder", "an object of id -> {content, special, ...}", {key: value})
        flags = [value.get(name) is True for name in ("special", "lstrip", "rstrip", "single_word", "normalized")]
        found[int(key)] = AddedToken(int(key), text, *flags)
    return tuple(found[id] for id in sorted(found))
