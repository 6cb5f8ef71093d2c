"""What systemd hears, over a path and an abstract name; and silence without systemd."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from engine.sd_notify import Notifier


def listen(address: str | bytes) -> socket.socket:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(address)
    receiver.settimeout(1)
    return receiver


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_messages(kind: str, tmp_path: Path) -> None:
    name = str(tmp_path / "notify") if kind == "path" else f"@engine-test-{os.getpid()}"
    address = name if kind == "path" else b"\0" + name[1:].encode()
    with listen(address) as receiver:
        notifier = Notifier({"NOTIFY_SOCKET": name})
        notifier.status("loading\nREADY=1  100 %")
        notifier.ready()
        notifier.watchdog()
        notifier.stopping()
        heard = [receiver.recv(1000) for _ in range(4)]
    assert heard == [b"STATUS=loading READY=1 100 %", b"READY=1", b"WATCHDOG=1", b"STOPPING=1"]


@pytest.mark.parametrize(
    "name", ["", "relative", "/nowhere/at/all", "@nobody-listens-here", "vsock:1:2", "/" + "x" * 300]
)
def test_nobody_listens(name: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.ready()
    notifier.status("x")
    assert Notifier({}).watchdog_interval_s is None


def test_a_deaf_listener_does_not_block(tmp_path: Path) -> None:
    name = str(tmp_path / "notify")
    with listen(name):
        notifier = Notifier({"NOTIFY_SOCKET": name})
        for _ in range(5000):
            notifier.watchdog()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_interval(env: dict[str, str], expected: float | None) -> None:
    assert Notifier(env).watchdog_interval_s == expected


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert Notifier().watchdog_interval_s == 2.0
