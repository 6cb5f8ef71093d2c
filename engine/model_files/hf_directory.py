"""Which files of a model directory (HF layout) are the weights, and whether it has a tokenizer."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelFileError
from engine.model_files.json_file import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth")


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory holds a tokenizer file the engine reads."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def safetensors_files(directory: Path) -> tuple[str, ...]:
    """Absolute paths of the weight files in loading order.

    Raises ModelFileError where there are none or the index names one that is missing.
    """
    index = directory / _INDEX
    if index.is_file():
        return _indexed(directory, index)
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    # Some repositories carry a second copy of all weights in another naming scheme.
    files = [path for path in files if not path.name.startswith("consolidated")] or files
    if not files:
        raise ModelFileError(f"{directory}: no *.safetensors weights{_hint(directory)}")
    return tuple(str(path.absolute()) for path in files)


def _indexed(directory: Path, index: Path) -> tuple[str, ...]:
    weight_map = read_json(index).section("weight_map").data
    if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFileError(f"{index}: weight_map must be a non-empty object of tensor name -> file name")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelFileError(f"{index}: weight_map names {name!r}, which is not a file of the same directory")
        if not (directory / name).is_file():
            raise ModelFileError(f"{index}: weight_map names {name}, which is missing from {directory}")
    return tuple(str((directory / name).absolute()) for name in names)


def _hint(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"; it holds {ggufs[0]}: give the path of the .gguf file itself"
    if any(name.endswith(_PICKLES) for name in names):
        return " (.bin, .pt and .pth files are not read: they are pickles, which can run code; convert them)"
    return ""
