"""A real `engine-serve` in a subprocess, on a free port, that always ends with its test."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 90.0


def _die_with_test() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class Server:
    """One running server; `port` is known once `wait_listening` has returned."""

    def __init__(self, args: list[str], log: Path, *, env: dict[str, str] | None = None) -> None:
        self.log_path = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.cli.serve", "--port", "0", "--cpu-threads", "1", *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
                preexec_fn=_die_with_test,
            )
        self.port = 0

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_listening(self) -> None:
        def listening() -> bool:
            for line in self.log.splitlines():
                if "event=listening" in line:
                    self.port = int(line.split("url=http://")[1].split()[0].rsplit(":", 1)[1])
                    return True
            return False

        self.until(listening, "listen")

    def wait_ready(self) -> Server:
        self.wait_listening()
        self.until(lambda: self.get("/health")[0] == 200, "be healthy")
        return self

    def until(self, condition: object, what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():  # type: ignore[operator]
            if self.process.poll() is not None:
                raise AssertionError(f"server ended with {self.process.returncode} instead of to {what}:\n{self.log}")
            if time.monotonic() > deadline:
                raise AssertionError(f"server did not {what} within {timeout_s} s:\n{self.log}")
            time.sleep(0.02)

    def get(self, path: str) -> tuple[int, dict]:
        return self.request("GET", path)

    def request(self, method: str, path: str, body: object = None) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except ConnectionError:
            return 0, {}
        finally:
            connection.close()

    def chat(self, text: str, **fields: object) -> tuple[int, dict]:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        return self.request("POST", "/v1/chat/completions", body)

    def children(self) -> dict[str, int]:
        """Process name (`scheduler`, `tokenizer`, `detokenizer`) -> pid."""
        import psutil

        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                title = " ".join(child.cmdline())
                if title.startswith("engine: "):
                    found[title.removeprefix("engine: ").split()[0]] = child.pid
        return found

    def scheduler(self) -> dict:
        """The scheduler's part of /server_info."""
        status, body = self.get("/server_info")
        assert status == 200, body
        return body["scheduler"]

    def wait_idle(self, timeout_s: float = 10.0) -> dict:
        """Wait until nothing runs; check that every page is free again and the audits were clean."""
        deadline = time.monotonic() + timeout_s
        while True:
            stats = self.scheduler()
            if not stats["running"] and not stats["waiting"] and stats["pages"]["in_flight"] == 0:
                break
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        pages = stats["pages"]
        assert pages["tail"] == 0, stats
        assert pages["free"] + pages["tree"] == pages["total"], stats
        time.sleep(0.3)  # the idle audit runs once the loop finds nothing to do
        assert self.scheduler()["audit_errors"] == 0, self.log
        return stats

    def stop(self) -> int:
        """SIGTERM and wait; the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        return self.process.returncode


@contextlib.contextmanager
def serve(*args: str, log: Path, env: dict[str, str] | None = None, ready: bool = True) -> Iterator[Server]:
    """A server for the length of a `with` block."""
    server = Server(list(args), log, env=env)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
