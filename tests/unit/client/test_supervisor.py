"""The supervisor over processes that do nothing: what a death, a stop or another start amid its own work does."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from engine import supervisor as module
from engine.client import ClientState, EngineClient
from engine.config import EngineConfig, HttpOptions, ProcessOptions
from engine.errors import ConfigError, EngineError, ProcessDiedError
from engine.ipc.child import ChildConfig, Layout
from engine.ipc.messages import Hello, Ready
from engine.model_files.types import ModelFiles
from engine.supervisor import RunDir, Supervisor
from engine.workers import Workers
from tests.support.fake_client import tiny_files


class Rig:
    """A server without HTTP workers."""

    def __init__(self) -> None:
        config = EngineConfig(http=HttpOptions(skip_server_warmup=True), process=ProcessOptions(on_crash="restart"))
        self.client = EngineClient(config)
        self.workers = Workers(self.client)
        self.supervisor = Supervisor(config, tiny_files(), self.client, self.workers)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.spawned = 0

    def spawn(self, name: str, child: msgspec.Struct) -> subprocess.Popen[bytes]:
        assert isinstance(child, ChildConfig)
        process = self.processes[child.name] = subprocess.Popen(["sleep", "60"])
        self.spawned += 1
        asyncio.get_running_loop().call_soon(self.client.on_process_ready, Ready(child.name, {"max_len": 100}))
        return process


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where run directories are made: a short path, for Unix sockets."""
    with tempfile.TemporaryDirectory() as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
        yield Path(base)


@pytest.fixture
async def rig(base: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    made = Rig()
    monkeypatch.setattr(module, "spawn", made.spawn)
    yield made
    await made.supervisor.stop()
    made.client.close()
    assert not os.listdir(base)
    assert all(process.returncode is not None for process in made.processes.values())


async def until(condition: object) -> None:
    async with asyncio.timeout(5):
        while not condition():  # ty: ignore[call-non-callable]
            await asyncio.sleep(0.002)


async def test_a_death_just_before_ready_ends_the_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell_ready() -> None:
        rig.processes["scheduler 0"].kill()
        await asyncio.sleep(60)

    monkeypatch.setattr(rig.workers, "tell_ready", tell_ready)
    with pytest.raises(ProcessDiedError, match="scheduler 0 was killed by signal 9"):
        await asyncio.wait_for(rig.supervisor.start(), 5)
    assert rig.client.state == "starting"


async def test_a_death_just_before_ready_is_one_more_restart(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.supervisor.start()
    tell_ready, tries = rig.workers.tell_ready, 0

    async def and_die() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            rig.processes["detokenizer 0"].kill()
            await asyncio.sleep(60)
        await tell_ready()

    monkeypatch.setattr(rig.workers, "tell_ready", and_die)
    rig.processes["scheduler 0"].kill()
    await until(lambda: tries == 2 and rig.client.state == "ready")
    assert rig.spawned == 9
    assert not rig.supervisor.failed.done()


async def test_a_death_names_the_whole_process(rig: Rig) -> None:
    rig.supervisor.config = msgspec.structs.replace(rig.supervisor.config, process=ProcessOptions(tp_size=2))
    await rig.supervisor.start()
    rig.processes["scheduler 0 rank 1"].kill()
    error = await asyncio.wait_for(asyncio.shield(rig.supervisor.failed), 5)
    assert "scheduler 0 rank 1 was killed by signal 9" in error.message


async def test_a_model_that_cannot_be_shared_starts_no_process(rig: Rig) -> None:
    rig.supervisor.config = msgspec.structs.replace(rig.supervisor.config, process=ProcessOptions(tp_size=7))
    with pytest.raises(ConfigError, match="--tp-size 7 cannot share"):
        await rig.supervisor.start()
    assert rig.spawned == 0


class _Failing:
    """A follower that fails when it is told that the processes are gone."""

    def __init__(self) -> None:
        self.fails = False

    def attach(self, model: ModelFiles, layout: Layout, hello: Hello) -> None: ...

    def set_state(self, state: ClientState, reason: str) -> None: ...

    def fail_all(self, error: EngineError) -> None: ...

    def detach(self) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("a follower failed")


async def test_the_run_directory_goes_whatever_fails_at_the_end(rig: Rig, base: Path) -> None:
    follower = _Failing()
    rig.client.followers.append(follower)
    await rig.supervisor.start()
    assert len(os.listdir(base)) == 1
    follower.fails = True
    with pytest.raises(RuntimeError):
        await rig.supervisor.stop()
    assert not os.listdir(base)


def test_a_run_directory_that_is_swept_before_it_is_locked_is_made_anew(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, tries = fcntl.flock, 0

    def raced(fd: int, operation: int) -> None:
        nonlocal tries
        tries += 1
        (path,) = base.iterdir()
        if tries == 1:  # another start has it locked, and will remove it
            other = os.open(path / "lock", os.O_RDWR)
            flock(other, operation)
            try:
                flock(fd, operation)
            finally:
                shutil.rmtree(path)
                os.close(other)
        if tries == 2:  # another start has removed it
            shutil.rmtree(path)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", raced)
    made = RunDir()
    assert tries == 3
    assert (made.path / "lock").exists()
    with (made.path / "lock").open() as again, pytest.raises(BlockingIOError):
        flock(again.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.remove()
    assert not os.listdir(base)
