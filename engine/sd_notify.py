"""Telling systemd how the service fares (sd_notify(3)); does nothing when not started by systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends to NOTIFY_SOCKET. Never raises and never blocks: a deaf service manager must not stop the engine."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        env = os.environ if environment is None else environment
        self._address = _address(env.get("NOTIFY_SOCKET", ""))
        self.watchdog_interval_s = _watchdog_interval_s(env)
        """Seconds between calls of `watchdog`: half of what systemd allows. None = systemd expects none."""

    def ready(self) -> None:
        """Start-up is over."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Shutdown has begun."""
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send("STATUS=" + " ".join(text.split()))

    def watchdog(self) -> None:
        """Still alive."""
        self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode("utf-8", "replace"), self._address)
        except OSError:
            pass


def _address(name: str) -> bytes | None:
    """A path, or an abstract name written with a leading @."""
    if name.startswith("@"):
        return b"\0" + os.fsencode(name[1:])
    return os.fsencode(name) if name.startswith("/") else None


def _watchdog_interval_s(env: Mapping[str, str]) -> float | None:
    try:
        limit_us = int(env.get("WATCHDOG_USEC", "0"))
        for_us = int(env.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    except ValueError:
        return None
    return limit_us / 2e6 if for_us and limit_us > 0 else None
