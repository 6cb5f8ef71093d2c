"""resolve: what the user named -> ModelFiles (where everything lies, and the config)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import ConfigError, ModelFileError
from engine.model_files import default_model
from engine.model_files.gguf_config import gguf_model_config
from engine.model_files.gguf_header import read_gguf_header
from engine.model_files.hf_config import hf_model_config
from engine.model_files.hf_directory import TOKENIZER_FILES, has_tokenizer, safetensors_files
from engine.model_files.hub import fetch_from_hub, is_hub_name
from engine.model_files.types import ModelConfig, ModelFiles

LoadFormat = Literal["auto", "dummy"]

ACCEPTED = "a directory with config.json and *.safetensors, a .gguf file, a hub name like org/name, or `default`"


def resolve(
    model: str | None = None,
    *,
    load_format: LoadFormat = "auto",
    tokenizer: str | None = None,
    revision: str | None = None,
    model_overrides: Mapping[str, object] | None = None,
) -> ModelFiles:
    """Find (or fetch) a model's files and read its config.

    model: None or `default`, a directory, a .gguf file, or a hub name.
    load_format: `dummy` needs only the config; weights are made up and a missing tokenizer is replaced.
    tokenizer: a directory, tokenizer.json, tokenizer.model, .gguf file or hub name to use instead of the model's own.
    model_overrides: ModelConfig fields to replace (`rope` may be a partial object).
    Raises ModelFileError saying what was tried, ConfigError for a wrong override.
    """
    if model is None or model == "default":
        files = _gguf(default_model.fetch_default_model(), default_model.NAME, load_format)
    else:
        path = Path(model).expanduser()
        if path.is_dir():
            files = _directory(path, model, load_format, tokenizer)
        elif path.is_file():
            if path.suffix != ".gguf":
                raise ModelFileError(f"model {model}: a file that is not .gguf; accepted are {ACCEPTED}")
            files = _gguf(path, model, load_format)
        elif is_hub_name(model) and path.suffix != ".gguf":
            path = fetch_from_hub(model, revision, weights=load_format != "dummy")
            files = _directory(path, model, load_format, tokenizer)
        else:
            raise ModelFileError(
                f"model {model} not found: there is no such file or directory and it is no hub name; "
                f"accepted are {ACCEPTED}"
            )
    if tokenizer is not None:
        files = msgspec.structs.replace(
            files, tokenizer_path=_tokenizer_path(tokenizer, revision), tokenizer_vocab_size=None
        )
    if model_overrides:
        files = msgspec.structs.replace(files, config=_overridden(files.config, model_overrides))
        if files.tokenizer_vocab_size is not None:
            files = msgspec.structs.replace(files, tokenizer_vocab_size=files.config.vocab_size)
    return files


def _gguf(path: Path, name: str, load_format: LoadFormat) -> ModelFiles:
    config = gguf_model_config(read_gguf_header(path))
    absolute = str(path.absolute())
    dummy = load_format == "dummy"
    return ModelFiles(
        name=name,
        format="dummy" if dummy else "gguf",
        config=config,
        path=absolute,
        weight_files=() if dummy else (absolute,),
        tokenizer_path=absolute,
    )


def _directory(path: Path, name: str, load_format: LoadFormat, tokenizer: str | None) -> ModelFiles:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; it holds {ggufs[0].name}: give the path of the .gguf file itself" if ggufs else ""
        raise ModelFileError(f"model {name}: no config.json in {path}{hint}")
    config = hf_model_config(path)
    dummy = load_format == "dummy"
    weight_files = () if dummy else safetensors_files(path)
    tokenizer_path, tokenizer_vocab_size = str(path.absolute()), None
    if tokenizer is None and not has_tokenizer(path):
        if not dummy:
            raise ModelFileError(
                f"model {name}: no {' or '.join(TOKENIZER_FILES)} in {path}; name a tokenizer with --tokenizer"
            )
        tokenizer_path = str(default_model.fetch_default_model())
        tokenizer_vocab_size = config.vocab_size
    return ModelFiles(
        name=name,
        format="dummy" if dummy else "safetensors",
        config=config,
        path=str(path.absolute()),
        weight_files=weight_files,
        tokenizer_path=tokenizer_path,
        tokenizer_vocab_size=tokenizer_vocab_size,
    )


def _tokenizer_path(tokenizer: str, revision: str | None) -> str:
    path = Path(tokenizer).expanduser()
    if not path.exists() and is_hub_name(tokenizer) and path.suffix not in (".gguf", ".json", ".model"):
        path = fetch_from_hub(tokenizer, revision, weights=False)
    if path.is_dir() and not has_tokenizer(path):
        raise ModelFileError(f"tokenizer {tokenizer}: no {' or '.join(TOKENIZER_FILES)} in {path}")
    if path.is_dir() or (path.is_file() and path.suffix in (".gguf", ".json", ".model")):
        return str(path.absolute())
    raise ModelFileError(
        f"tokenizer {tokenizer} not found; accepted are a directory with {' or '.join(TOKENIZER_FILES)}, "
        "one of these files, a .gguf file, or a hub name like org/name"
    )


def _overridden(config: ModelConfig, overrides: Mapping[str, object]) -> ModelConfig:
    """The config with fields replaced; both levels of names and all types are checked."""
    fields = msgspec.to_builtins(config)
    rope = overrides.get("rope")
    unknown = [name for name in overrides if name not in fields]
    if isinstance(rope, Mapping):
        unknown += [f"rope.{name}" for name in rope if name not in fields["rope"]]
        overrides = {**overrides, "rope": {**fields["rope"], **rope}}
    if unknown:
        raise ConfigError(
            f"model overrides: unknown field {', '.join(unknown)}; known are {', '.join(fields)}",
            param="model_overrides",
        )
    try:
        return msgspec.convert({**fields, **overrides}, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model overrides: {error}", param="model_overrides") from error
