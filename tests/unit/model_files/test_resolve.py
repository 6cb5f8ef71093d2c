from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError, ModelFileError
from engine.model_files import default_model
from engine.model_files.resolve import resolve
from tests.support.gguf_writer import bpe_keys, write_gguf
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from tests.unit.model_files.test_hf_config import BASE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_tiny_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(BASE))
    (directory / "model.safetensors").touch()
    return directory


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the default model's file, already in the cache."""
    cache = tmp_path / "cache"
    cache.mkdir()
    write_tiny_tokenizer(tmp_path / "tokenizer")
    path = write_gguf(
        cache / default_model.FILE_NAME, keys=bpe_keys(tmp_path / "tokenizer") | {"llama.vocab_size": 300}
    )
    monkeypatch.setenv("ENGINE_CACHE", str(cache))
    monkeypatch.setattr(default_model, "FILE_BYTES", path.stat().st_size)
    monkeypatch.setattr(default_model, "FILE_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_directory(model: Path) -> None:
    files = resolve(str(model))
    assert (files.name, files.format, files.path) == (str(model), "safetensors", str(model))
    assert files.weight_files == (str(model / "model.safetensors"),)
    assert (files.tokenizer_path, files.tokenizer_vocab_size) == (str(model), None)
    assert files.config.eos_ids == (2,)


def test_dummy_needs_only_the_config(model: Path, default: Path) -> None:
    (model / "model.safetensors").unlink()
    files = resolve(str(model), load_format="dummy")
    assert (files.format, files.weight_files, files.tokenizer_vocab_size) == ("dummy", (), None)
    (model / "tokenizer.json").unlink()
    files = resolve(str(model), load_format="dummy")
    assert (files.tokenizer_path, files.tokenizer_vocab_size) == (str(default), 400)
    with pytest.raises(ModelFileError, match="--tokenizer"):
        (model / "model.safetensors").touch()
        resolve(str(model))


@pytest.mark.parametrize("name", [None, "default"])
def test_default_model(default: Path, name: str | None) -> None:
    files = resolve(name)
    assert (files.name, files.format) == ("SmolLM2-135M-Instruct", "gguf")
    assert files.weight_files == (str(default),)
    assert files.tokenizer_path == str(default)


def test_gguf_file_and_separate_tokenizer(default: Path, model: Path) -> None:
    files = resolve(str(default), tokenizer=str(model))
    assert (files.name, files.path, files.tokenizer_path) == (str(default), str(default), str(model))
    assert resolve(str(model), tokenizer=str(model / "tokenizer.json")).tokenizer_path == str(model / "tokenizer.json")
    with pytest.raises(ModelFileError, match="accepted are a directory with"):
        resolve(str(model), tokenizer=str(model / "nothing.json"))


def test_sharded_weights(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"b": "two.safetensors", "a": "one.safetensors", "c": "two.safetensors"}})
    )
    with pytest.raises(ModelFileError, match=r"names one\.safetensors, which is missing"):
        resolve(str(model))
    (model / "one.safetensors").touch()
    (model / "two.safetensors").touch()
    assert [Path(path).name for path in resolve(str(model)).weight_files] == ["one.safetensors", "two.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ModelFileError, match="not a file of the same directory"):
        resolve(str(model))
    index.write_text("{}")
    with pytest.raises(ModelFileError, match="non-empty"):
        resolve(str(model))


def test_unindexed_weights_are_sorted_without_second_copies(model: Path) -> None:
    (model / "model.safetensors").unlink()
    for name in ("b.safetensors", "a.safetensors", "consolidated.safetensors"):
        (model / name).touch()
    assert [Path(path).name for path in resolve(str(model)).weight_files] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(("name", "message"), [("pytorch_model.bin", "pickles"), ("x.gguf", r"path of the \.gguf")])
def test_no_weights(model: Path, name: str, message: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).touch()
    with pytest.raises(ModelFileError, match=message):
        resolve(str(model))


def test_what_cannot_be_found_says_what_is_accepted(tmp_path: Path) -> None:
    for name in ("nothing", str(tmp_path / "nothing"), "a/b/c", "no.gguf"):
        with pytest.raises(ModelFileError, match=r"not found: .* accepted are a directory"):
            resolve(name)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelFileError, match=r"not \.gguf"):
        resolve(str(tmp_path / "weights.bin"))
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_offline_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelFileError, match=r"no local path org/name, not in the local cache .* HF_HUB_OFFLINE"):
        resolve("org/name")


def test_hub_snapshot_is_used_like_a_directory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def snapshot(name: str, **options: object) -> str:
        asked.append({"name": name, **options})
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    files = resolve("org/name", revision="main")
    assert (files.name, files.path) == ("org/name", str(model))
    assert (asked[0]["name"], asked[0]["revision"]) == ("org/name", "main")
    assert "*.safetensors" in str(asked[0]["allow_patterns"])
    resolve("org/name", load_format="dummy")
    assert "*.safetensors" not in str(asked[1]["allow_patterns"])


def test_overrides(model: Path) -> None:
    files = resolve(str(model), model_overrides={"max_position": 64, "rope": {"theta": 5.0}})
    assert (files.config.max_position, files.config.rope.theta) == (64, 5.0)
    with pytest.raises(ConfigError, match=r"unknown field depth, rope\.speed"):
        resolve(str(model), model_overrides={"depth": 1, "rope": {"speed": 2}})
    with pytest.raises(ConfigError, match="Expected `int`"):
        resolve(str(model), model_overrides={"max_position": "far"})


def test_imports_stay_light() -> None:
    code = (
        "import sys, engine.model_files, engine.tokenizer, engine.model_files.resolve, engine.tokenizer.load\n"
        "heavy = {'torch', 'numpy', 'gguf', 'huggingface_hub', 'tokenizers', 'sentencepiece', 'tqdm', 'jinja2'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
