"""What --tp-size cannot go with, and how it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from engine.config import Device, EngineConfig, ProcessOptions, SchedulerOptions
from engine.errors import ConfigError
from scheduler_proc.models.spec import DecoderSpec
from scheduler_proc.parallel.fit import check_model, check_options
from tests.support.tiny_models import write_tiny_model
from tests.unit.models.paging import spec_in


@pytest.fixture
def spec(tmp_path: Path) -> DecoderSpec:
    options = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 144}
    return spec_in(write_tiny_model(tmp_path, tokenizer=False, **options))


def _config(device: Device, size: int) -> EngineConfig:
    return EngineConfig(scheduler=SchedulerOptions(device=device), process=ProcessOptions(tp_size=size))


@pytest.mark.parametrize("size", [1, 2, 4, 12])
def test_shares_that_can_be_cut(spec: DecoderSpec, size: int) -> None:
    check_model(spec, size)


@pytest.mark.parametrize("size", [3, 5, 6, 8, 24])
def test_shares_that_cannot_be_cut(spec: DecoderSpec, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"--tp-size {size} .*12 heads.*allowed for this model: 1, 2, 4, 12\."):
        check_model(spec, size)


def test_an_mlp_that_cannot_be_cut(spec: DecoderSpec) -> None:
    with pytest.raises(ConfigError, match=r"MLP of 146; allowed for this model: 1, 2\."):
        check_model(replace(spec, intermediate_size=146), 4)


@pytest.mark.parametrize("device", ["null", "delayed"])
def test_devices_that_share_nothing(device: Device) -> None:
    with pytest.raises(ConfigError, match=f"--tp-size 2 .*--device {device}"):
        check_options(_config(device, 2))


def test_sums_of_more_than_two_have_no_fixed_order() -> None:
    check_options(
        msgspec.structs.replace(_config("cpu", 2), scheduler=SchedulerOptions(device="cpu", deterministic=True))
    )
    config = _config("cpu", 3)
    with pytest.raises(ConfigError, match="--deterministic goes with --tp-size 1 and 2, not with 3"):
        check_options(msgspec.structs.replace(config, scheduler=SchedulerOptions(device="cpu", deterministic=True)))


def test_more_ranks_than_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = _config("cuda", 2)
    check_options(config)
    larger = msgspec.structs.replace(config, process=ProcessOptions(tp_size=4))
    with pytest.raises(ConfigError, match="--tp-size 4 needs as many CUDA devices, 2 can be seen; allowed: 1 to 2"):
        check_options(larger)
