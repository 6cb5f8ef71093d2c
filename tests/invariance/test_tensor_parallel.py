"""Two processes that share a model say what one says, whatever the scheduler does: chunks, overlap, retraction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig, ProcessOptions
from engine.ipc.sockets import Pusher, context
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from scheduler_proc.build import build
from scheduler_proc.parallel.group import Distributed, Group
from scheduler_proc.parallel.lead import LeadingDevice
from tests.support.matrix import assert_same, cases, config, references, run_together
from tests.support.scheduler import Harness
from tests.support.tiny_models import write_tiny_model
from tests.unit.parallel.rank_one import HELLO
from tests.unit.parallel.ranks import ROOT, TIMEOUT_S

LENGTHS = [1, 17, 40, 64, 33, 16]
TOKENS = 24
STARTS = (
    {"overlap_depth": 0, "page_size": 16, "chunked_prefill_size": 4096},
    {"overlap_depth": 1, "page_size": 1, "chunked_prefill_size": 7},
    # Too small for all of them: some are retracted and come back.
    {
        "overlap_depth": 2,
        "page_size": 4,
        "chunked_prefill_size": 32,
        "max_total_tokens": 112,
        "schedule_conservativeness": 0.01,
    },
)


class LeadingHarness(Harness):
    """A scheduler that leads another rank."""

    @classmethod
    def of_group(cls, folder: Path, start: EngineConfig, model: ModelFiles, group: Group, plans: Pusher) -> Harness:
        self = cls.__new__(cls)
        self.workload, device = build(start, model, group=group)
        self.device = LeadingDevice(device, [plans])
        self.cache, self.slots, self.planner = self.workload.cache, self.workload.slots, self.workload.planner
        self._wire(folder, start.overlap_depth, True)
        return self


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "vocab_size": 403}
    model = resolve(str(write_tiny_model(tmp_path / "model", "qwen3", **shape)))
    made = cases(model.config.vocab_size, LENGTHS, TOKENS)
    starts = tuple(
        msgspec.structs.replace(config(**options), process=ProcessOptions(cpu_threads=1, tp_size=2))
        for options in STARTS
    )
    (tmp_path / "work").write_bytes(msgspec.msgpack.encode((model, starts)))
    other = subprocess.Popen([sys.executable, "-m", "tests.unit.parallel.rank_one", str(tmp_path)], cwd=ROOT)
    try:
        expected = references(tmp_path, model, made)
        group = Distributed(0, 2, tmp_path / "meeting", torch.device("cpu"), TIMEOUT_S)
        plans = Pusher(context(), f"ipc://{tmp_path}/plans", HELLO)
        for number, start in enumerate(starts):
            harness = LeadingHarness.of_group(tmp_path, start, model, group, plans)
            assert_same(str(STARTS[number]), expected, run_together(harness, made))
            (tmp_path / f"done-{number}").touch()
            assert bool(harness.planner.num_retractions) == ("max_total_tokens" in STARTS[number])
        group.close()
        assert other.wait(TIMEOUT_S) == 0
    finally:
        other.kill()
        other.wait()
