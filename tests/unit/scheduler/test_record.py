"""What is recorded, and what happens when it cannot be: nothing that people wrote, and never at the server's cost."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.config import EngineConfig, HttpOptions, SchedulerOptions
from engine.errors import ConfigError
from engine.ipc.messages import PinTokens, TokenizedRequest, pack_i32
from scheduler_proc.plan import Adjustment, Joins, PromptScores, StepPlan
from scheduler_proc.record import Header, Received, Turn, WithoutText, encode_plan, read_record
from tests.support.recorded import Recorded


def messages(path: Path) -> list:
    return [entry.message for entry in read_record(path) if isinstance(entry, Received)]


def test_nothing_that_people_wrote_is_recorded(tmp_path: Path) -> None:
    options = SchedulerOptions(device="null", max_running_requests=4, page_size=4)
    config = EngineConfig(http=HttpOptions(api_key="hush-key"), scheduler=options)
    recorded = Recorded(tmp_path, config=config)
    recorded.add(1, [*range(3, 20)], salt="hush-salt", stop=("hush-stop", "hush-too"), max_tokens=2)
    recorded.run()
    recorded.inbox.messages.append(PinTokens(0, 1, pack_i32(range(3, 19)), 60.0, "hush-salt"))
    recorded.add(2, [*range(3, 20)], salt="hush-other", max_tokens=2)
    recorded.add(3, [*range(3, 20)], max_tokens=2)
    recorded.run()
    recorded.device.close()
    data = recorded.path.read_bytes()
    assert b"hush" not in data and b"label" not in data
    requests = {m.request: m for m in messages(recorded.path) if isinstance(m, TokenizedRequest)}
    (pin,) = (m for m in messages(recorded.path) if isinstance(m, PinTokens))
    assert requests[1].cache_salt == pin.cache_salt != requests[2].cache_salt
    assert requests[3].cache_salt is None
    assert len(requests[1].sampling.stop) == 2


def test_a_salt_cannot_be_found_by_trying() -> None:
    pin = PinTokens(0, 1, b"", 1.0, "tenant \ud800")
    one, other = WithoutText(), WithoutText()
    assert one(pin) == one(pin) != other(pin)


def test_an_exceptions_text_is_not_recorded(tmp_path: Path) -> None:
    class Broken:
        def launch(self, plan: StepPlan) -> None:
            raise ValueError("hush")

        def pages_freed(self, pages: np.ndarray) -> None: ...

        def close(self) -> None: ...

    recorded = Recorded(tmp_path, device=Broken())  # type: ignore[arg-type]
    recorded.add(1, [3, 4], max_tokens=2)
    recorded.run()
    recorded.device.close()
    data = recorded.path.read_bytes()
    assert b"hush" not in data and b"ValueError" in data


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text("of before")
    path.chmod(0o644)
    for name in ("record", "new"):
        recorded = Recorded(tmp_path, path=tmp_path / name)
        assert stat.S_IMODE(recorded.path.stat().st_mode) == 0o600
        recorded.device.close()
    assert b"of before" not in path.read_bytes()


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mode = Path("/dev/full").stat().st_mode
    recorded = Recorded(tmp_path, path=Path("/dev/full"))
    with caplog.at_level(logging.ERROR):
        for number in range(1, 40):
            # Enough to fill any buffer.
            recorded.add(number, [number] * 400, max_tokens=3)
            recorded.run()
        recorded.device.close()
    assert recorded.workload.num_output_tokens == 39 * 3
    assert [record.getMessage().split()[0] for record in caplog.records] == ["event=record_ended"]
    assert Path("/dev/full").stat().st_mode == mode


def test_a_disk_that_is_full_at_the_last_moment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded(tmp_path, path=Path("/dev/full"))
    recorded.turn()
    recorded.device.close()
    assert "No space left" in caplog.text


def test_a_file_that_cannot_be_made_is_an_option_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record .*/none/record cannot be written: No such file"):
        Recorded(tmp_path, path=tmp_path / "none" / "record")


def test_every_turn_is_recorded_with_its_time(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.turn(5)
    recorded.device.close()
    entries = list(read_record(recorded.path))
    assert isinstance(entries[0], Header)
    times = [entry.time_s for entry in entries if isinstance(entry, Turn)]
    assert len(times) == 5 and times == sorted(times)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


PLAN = StepPlan(
    step=1,
    rows=ids(0),
    num_decode=0,
    q_lens=ids(2),
    kv_lens=ids(2),
    tokens=ids(5, 6),
    sample=np.array([True]),
    all_greedy=True,
    needs_filter=False,
    rows_version=1,
    slots_version=-1,
    joins=None,
    pages=(None,),
)
ADJUSTMENT = Adjustment(0, 1.5, 0.5, 0.25, ids(5, 6), ids(), ids(9), np.array([1.5], np.float32), 4, ids(2))


def joining(**changes: object) -> StepPlan:
    one = np.zeros(1, np.float32)
    adjustment = msgspec.structs.replace(ADJUSTMENT, **changes)
    seeds, stop_ids = np.zeros(1, np.int64), np.zeros((1, 0), np.int32)
    joins = Joins(ids(0), ids(0), one, one, ids(-1), one, seeds, stop_ids, (adjustment,))
    return msgspec.structs.replace(PLAN, joins=joins)


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(PLAN, adjusts_logits=True),
        msgspec.structs.replace(PLAN, logprobs=ids(3)),
        msgspec.structs.replace(PLAN, prompt_scores=(PromptScores(0, 0, ids(6), 2),)),
    ],
)
def test_plans_that_differ_anywhere_are_told_apart(other: StepPlan) -> None:
    assert encode_plan(PLAN) == encode_plan(msgspec.structs.replace(PLAN, rows=ids(0)))
    assert encode_plan(PLAN) != encode_plan(other)


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.25},
        {"prompt_ids": ids(5, 7)},
        {"bias_values": np.array([2.5], np.float32)},
        {"min_len": np.int32(5)},
        {"end_ids": ids()},
    ],
)
def test_adjustments_are_a_part_of_the_plan(change: dict[str, object]) -> None:
    assert encode_plan(joining()) == encode_plan(joining(min_len=np.int32(4)))
    assert encode_plan(joining()) != encode_plan(joining(**change))
