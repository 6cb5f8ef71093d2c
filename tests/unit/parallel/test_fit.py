"""What --tp-size cannot go with, and how it says so."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.config import Device, EngineConfig, ProcessOptions, SchedulerOptions
from engine.errors import ConfigError
from scheduler_proc.parallel.fit import check_options


def _config(device: Device, size: int) -> EngineConfig:
    return EngineConfig(scheduler=SchedulerOptions(device=device), process=ProcessOptions(tp_size=size))


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
