"""What a start computes in, by checkpoint, options and whether there are CPU kernels."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch

from engine.config import EngineConfig, ModelOptions, SchedulerOptions
from engine.errors import ConfigError, StartupError
from engine.model_files.types import ModelFiles
from kernels.cpu import native
from scheduler_proc.numerics import Numerics, choose_numerics, refuse_without_a_model
from tests.support.tiny_models import write_tiny_model
from tests.unit.weights.files import gguf_files, hf_files


@pytest.fixture
def models(tmp_path: Path) -> dict[str, ModelFiles]:
    floats = hf_files(write_tiny_model(tmp_path, tokenizer=False))
    found = {"safetensors": floats, "dummy": msgspec.structs.replace(floats, format="dummy", weight_files=())}
    for name, kind in (("Q4_1", gguf.GGMLQuantizationType.Q4_1), ("F16", gguf.GGMLQuantizationType.F16)):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        writer.add_tensor("norm", np.ones(32, np.float32))
        writer.add_tensor("matrix", gguf.quants.quantize(np.ones((2, 64), np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found[name] = gguf_files(tmp_path / f"{name}.gguf", floats)
    return found


def config(**options: str) -> EngineConfig:
    return msgspec.convert({"model": options}, EngineConfig)


def on(device: str, deterministic: bool = False, **options: str) -> EngineConfig:
    scheduler = {"device": device, "deterministic": deterministic}
    return msgspec.convert({"model": options, "scheduler": scheduler}, EngineConfig)


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("Q4_1", {}, Numerics(False, torch.bfloat16, torch.bfloat16)),
        ("safetensors", {}, Numerics(False, torch.bfloat16, torch.bfloat16)),
        ("safetensors", {"dtype": "float16"}, Numerics(False, torch.float16, torch.float16)),
        ("safetensors", {"dtype": "float32"}, Numerics(False, torch.float32, torch.float32)),
        ("safetensors", {"kv_cache_dtype": "float16"}, Numerics(False, torch.bfloat16, torch.float16)),
    ],
)
def test_on_cuda_nothing_is_packed(
    models: dict[str, ModelFiles], model: str, options: dict[str, str], expected: Numerics
) -> None:
    assert choose_numerics(on("cuda", **options), models[model]) == expected


def test_on_cuda_a_checkpoint_in_float16_stays(models: dict[str, ModelFiles]) -> None:
    model = models["safetensors"]
    half = msgspec.structs.replace(model, config=msgspec.structs.replace(model.config, dtype="float16"))
    assert choose_numerics(on("cuda"), half) == Numerics(False, torch.float16, torch.float16)


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_int8_is_for_the_cpu(models: dict[str, ModelFiles], options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="CPU"):
        choose_numerics(on("cuda", **options), models["safetensors"])


@pytest.mark.usefixtures("kernels")
def test_deterministic_on_a_cpu_wants_packed_weights(models: dict[str, ModelFiles]) -> None:
    assert choose_numerics(on("cpu", deterministic=True), models["Q4_1"]).packed
    for device, model, options in (("cpu", "safetensors", {}), ("delayed", "Q4_1", {"dtype": "float32"})):
        with pytest.raises(ConfigError, match="--deterministic"):
            choose_numerics(on(device, deterministic=True, **options), models[model])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: object())


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("Q4_1", {}, Numerics(True, torch.float32, torch.float16)),
        ("Q4_1", {"kv_cache_dtype": "int8"}, Numerics(True, torch.float32, torch.int8)),
        ("Q4_1", {"kv_cache_dtype": "bfloat16"}, Numerics(True, torch.float32, torch.bfloat16)),
        ("Q4_1", {"quantization": "int8"}, Numerics(True, torch.float32, torch.float16)),
        ("Q4_1", {"dtype": "float32"}, Numerics(False, torch.float32, torch.float32)),
        ("Q4_1", {"dtype": "bfloat16"}, Numerics(False, torch.bfloat16, torch.bfloat16)),
        ("F16", {}, Numerics(False, torch.float32, torch.float32)),
        ("F16", {"quantization": "int8"}, Numerics(True, torch.float32, torch.float16)),
        ("safetensors", {}, Numerics(False, torch.float32, torch.float32)),
        ("safetensors", {"kv_cache_dtype": "float16"}, Numerics(False, torch.float32, torch.float16)),
        (
            "safetensors",
            {"quantization": "int8", "kv_cache_dtype": "float32"},
            Numerics(True, torch.float32, torch.float32),
        ),
        ("dummy", {"quantization": "int8"}, Numerics(True, torch.float32, torch.float16)),
    ],
)
def test_with_kernels(models: dict[str, ModelFiles], model: str, options: dict[str, str], expected: Numerics) -> None:
    assert choose_numerics(config(**options), models[model]) == expected


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("model", "num_warnings"), [("Q4_1", 1), ("F16", 0), ("safetensors", 0), ("dummy", 0)])
def test_without_kernels_everything_is_float32(
    models: dict[str, ModelFiles], model: str, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_numerics(config(), models[model]) == Numerics(False, torch.float32, torch.float32)
    assert caplog.text.count("event=cpu_kernels_missing") == len(caplog.records) == num_warnings


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_what_needs_kernels_says_so(models: dict[str, ModelFiles], options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"int8 needs the CPU kernels.*make setup"):
        choose_numerics(config(**options), models["Q4_1"])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("Q4_1", {"quantization": "int8", "dtype": "float32"}, "--dtype float32 .* --quantization int8 needs packed"),
        (
            "Q4_1",
            {"kv_cache_dtype": "int8", "dtype": "bfloat16"},
            "--dtype bfloat16 .*cache-dtype int8 needs packed",
        ),
        ("safetensors", {"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 needs packed .* add --quantization int8"),
        ("F16", {"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 needs packed .* add --quantization int8"),
    ],
)
def test_contradictions(models: dict[str, ModelFiles], model: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_numerics(config(**options), models[model])


@pytest.mark.parametrize(("error", "raised"), [(ValueError("no mmx"), ConfigError), (OSError("no ELF"), StartupError)])
def test_a_library_that_does_not_load(
    models: dict[str, ModelFiles], monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    def library() -> None:
        raise error

    monkeypatch.setattr(native, "library", library)
    with pytest.raises(raised, match=str(error)):
        choose_numerics(config(), models["Q4_1"])
    assert not choose_numerics(config(dtype="float32"), models["Q4_1"]).packed


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_the_null_device_has_neither(options: dict) -> None:
    null = SchedulerOptions(device="null")
    refuse_without_a_model(EngineConfig(scheduler=null))
    with pytest.raises(ConfigError, match=r"--device null has no .* int8; leave one out"):
        refuse_without_a_model(EngineConfig(scheduler=null, model=ModelOptions(**options)))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("head_dim", [20, 100, 264])
def test_heads_that_the_kernels_cannot_take_are_unpacked(
    models: dict[str, ModelFiles], caplog: pytest.LogCaptureFixture, head_dim: int
) -> None:
    model = models["Q4_1"]
    odd = msgspec.structs.replace(model, config=msgspec.structs.replace(model.config, head_dim=head_dim))
    with caplog.at_level(logging.WARNING):
        assert choose_numerics(config(), odd) == Numerics(False, torch.float32, torch.float32)
    assert f"heads of {head_dim} elements" in caplog.text
    with pytest.raises(ConfigError, match=f"needs heads of .* have {head_dim}"):
        choose_numerics(config(quantization="int8"), odd)
