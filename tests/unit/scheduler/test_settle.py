"""What `--device auto` and `cuda` mean on a machine, and what follows from the device."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from engine.config import (
    EngineConfig,
    ModelOptions,
    ProcessOptions,
    SchedulerOptions,
    SpeculativeAlgorithm,
    SpeculativeOptions,
)
from engine.errors import ConfigError
from scheduler_proc.build import build_workload
from scheduler_proc.settle import mixed_chunk_size, settle
from tests.support.dflash_drafters import BLOCK, write_drafter
from tests.support.tiny_models import tiny_config
from tools.decode_bench.shapes import shaped_model


def config(device: str, **options: object) -> EngineConfig:
    return EngineConfig(scheduler=SchedulerOptions(device=device, **options))  # type: ignore[arg-type]


@pytest.fixture(params=[None, (7, 5), (9, 0)], ids=str)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int] | None:
    found = request.param
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)
    return found


def test_auto_takes_what_is_there(capability: tuple[int, int] | None) -> None:
    settled = settle(config("auto", page_size=4))
    assert settled.device == ("cuda" if capability == (9, 0) else "cpu")
    assert settled.page_size == 4


def test_cuda_is_refused_where_there_is_none(capability: tuple[int, int] | None) -> None:
    if capability == (9, 0):
        assert settle(config("cuda")).device == "cuda"
        return
    with pytest.raises(ConfigError, match=r"--device cuda: .*(no CUDA device|7\.5, 8\.0 is needed)"):
        settle(config("cuda"))


def test_a_build_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ConfigError, match="built without CUDA"):
        settle(config("cuda"))
    assert settle(config("auto")).device == "cpu"


@pytest.mark.parametrize("device", ["cpu", "null", "delayed"])
def test_other_devices_are_not_asked_about(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked"))
    assert settle(config(device)).device == device


def test_options_without_effect_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    settle(config("cpu", cuda_graph_max_bs=4, disable_cuda_graph=True))
    assert "option=--cuda-graph-max-bs,--disable-cuda-graph device=cpu" in caplog.text
    caplog.clear()
    settle(config("null", deterministic=True, mem_fraction_static=0.5))
    assert "option=--mem-fraction-static,--deterministic device=null" in caplog.text
    caplog.clear()
    settle(config("null"))
    assert not caplog.text


def test_defaults_follow_the_device() -> None:
    cpu, cuda = config("cpu"), config("cuda")
    assert (cpu.max_running_requests, cpu.chunked_prefill_size, cpu.page_size) == (64, 256, 16)
    assert (cuda.max_running_requests, cuda.chunked_prefill_size, cuda.page_size) == (256, 4096, 64)
    assert (cpu.overlap_depth, cuda.overlap_depth) == (0, 1)
    assert cpu.cuda_graph_max_bs == 0
    assert cuda.cuda_graph_max_bs == 256
    assert config("cuda", max_running_requests=10, cuda_graph_max_bs=64).cuda_graph_max_bs == 10
    assert config("cuda", cuda_graph_max_bs=6).cuda_graph_max_bs == 6
    assert config("cuda", disable_cuda_graph=True).cuda_graph_max_bs == 0


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        # About 100 ms on a fast device, whatever the model; never more than a step may hold.
        ("8b", {"device": "cuda"}, 4096),
        ("8b", {"device": "cuda", "chunked_prefill_size": 16384}, 4096),
        ("0.6b", {"device": "cuda"}, 4096),
        ("0.6b", {"device": "cuda", "chunked_prefill_size": 300}, 300),
        ("8b", {"device": "cuda", "mixed_chunk_size": 5000}, 5000),
        ("8b", {"device": "cpu"}, 256),
    ],
)
def test_steps_that_hold_up_who_decodes(shape: str, options: dict[str, object], expected: int, tmp_path: Path) -> None:
    given = config(**options)  # type: ignore[arg-type]
    assert mixed_chunk_size(given, shaped_model(shape, tmp_path)) == expected


def test_devices_share_the_work_of_a_step(tmp_path: Path) -> None:
    given = config("cuda", chunked_prefill_size=16384)
    given = msgspec.structs.replace(given, process=ProcessOptions(tp_size=2))
    assert mixed_chunk_size(given, shaped_model("8b", tmp_path)) == 8192


def test_what_options_came_to_is_told(tmp_path: Path) -> None:
    model = shaped_model("tiny", tmp_path)
    given = config("null", max_running_requests=7, chunked_prefill_size=40, mixed_chunk_size=500)
    workload = build_workload(given, model, 1000, lambda pages: None)
    assert workload.stats(0).settled == {
        "device": "null",
        "max_running_requests": 7,
        "max_total_tokens": 992,
        "chunked_prefill_size": 40,
        "mixed_chunk_size": 40,
        "page_size": 16,
        "overlap_depth": 1,
        "cuda_graph_max_bs": 0,
    }


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE2", "EAGLE3", "DFLASH", "STANDALONE"])
def test_drafters_that_need_a_path(algorithm: SpeculativeAlgorithm, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path"):
        model = ModelOptions(model="another")
        settle(EngineConfig(model=model, speculative=SpeculativeOptions(speculative_algorithm=algorithm)))
    if algorithm != "STANDALONE":
        options = SpeculativeOptions(speculative_algorithm=algorithm, speculative_draft_model_path=str(tmp_path))
        with pytest.raises(ConfigError, match=r"there is no config\.json"):
            settle(EngineConfig(speculative=options))


@pytest.mark.parametrize(("algorithm", "top_k"), [("EAGLE", 1), ("EAGLE2", 4), ("EAGLE3", 4), ("STANDALONE", 4)])
def test_the_width_of_trees(algorithm: SpeculativeAlgorithm, top_k: int) -> None:
    options = SpeculativeOptions(speculative_algorithm=algorithm, speculative_num_draft_tokens=2)
    for asked, meant in ((None, top_k), (2, 2)):
        config = EngineConfig(speculative=msgspec.structs.replace(options, speculative_eagle_topk=asked))
        assert config.eagle_topk == meant and config.draft_places == max(1, 4 * meant)


def test_a_drafter_for_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --speculative-algorithm"):
        settle(EngineConfig(speculative=SpeculativeOptions(speculative_draft_model_path=str(tmp_path))))


def test_the_default_model_has_a_drafter() -> None:
    for model in (None, "default"):
        speculative = SpeculativeOptions(speculative_algorithm="EAGLE3")
        config = EngineConfig(
            model=ModelOptions(model=model), scheduler=SchedulerOptions(device="cpu"), speculative=speculative
        )
        path = settle(config).speculative.speculative_draft_model_path
        assert path is not None and (Path(path) / "model.safetensors").stat().st_size <= 16_000_000


def test_blocks_are_the_drafters_or_shorter(tmp_path: Path) -> None:
    write_drafter(tmp_path, tiny_config())
    for asked, meant in ((None, BLOCK), (3, 3)):
        speculative = SpeculativeOptions(
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=str(tmp_path),
            speculative_dflash_block_size=asked,
        )
        config = settle(EngineConfig(scheduler=SchedulerOptions(device="cpu"), speculative=speculative))
        assert config.speculative.speculative_dflash_block_size == meant and config.max_drafts == meant - 1
        assert config.draft_places == meant - 1
    longer = msgspec.structs.replace(speculative, speculative_dflash_block_size=BLOCK + 1)
    with pytest.raises(ConfigError, match=f"more than the {BLOCK} that the drafter"):
        settle(EngineConfig(scheduler=SchedulerOptions(device="cpu"), speculative=longer))
