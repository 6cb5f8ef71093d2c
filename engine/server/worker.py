"""`python -m engine.server.worker FD`: one HTTP worker, configured by the message on file descriptor FD."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys

import msgspec
import setproctitle
import uvloop

from engine.client import ClientState, EngineClient
from engine.errors import EngineError, RemoteError
from engine.ipc.channel import Channel
from engine.ipc.child import CHILD_SIGNALS, die_with_parent, raise_file_limit, setup_logging
from engine.ipc.control import (
    AbortCall,
    Answer,
    Attach,
    Detach,
    End,
    FailAll,
    Full,
    InFlight,
    SamplesCall,
    StateChange,
    ToWorker,
    WorkerConfig,
)
from engine.server.app import create_app
from engine.server.connections import Receiver
from engine.server.fronts import WorkerFront
from engine.server.keys import FRONTS, METRICS
from engine.server.serving import set_up

log = logging.getLogger(__name__)

COUNT_EVERY_S = 0.02
"""Between two looks, while draining, at how many requests are left."""


class _Worker:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._client = EngineClient(config.config, config.front, config.life)
        self._client.created = config.created
        self._main: Channel[ToWorker] = Channel(ToWorker, self._receive, self._end)
        self._ended = asyncio.Event()
        self._counting: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Until the main process says End, or is gone."""
        app = create_app(self._client)
        app[FRONTS] = WorkerFront(self._main)
        self._metrics = app[METRICS]
        runner, server = await set_up(app)
        connections = socket.socket(fileno=self._config.connections_fd)
        receiver = Receiver(connections, server, lambda full: self._main.send(Full(full)))
        gc.collect()
        gc.freeze()
        await self._main.connect(socket.socket(fileno=self._config.control_fd))
        receiver.start()
        await self._ended.wait()
        receiver.stop()
        if self._counting is not None:
            self._counting.cancel()
        await runner.cleanup()
        self._client.close()
        self._main.close()

    def _end(self) -> None:
        self._ended.set()

    def _receive(self, message: ToWorker) -> None:
        if isinstance(message, StateChange):
            self._set_state(message)
        elif isinstance(message, FailAll):
            self._client.fail_all(RemoteError(message.error))
        elif isinstance(message, AbortCall):
            self._main.send(Answer(message.call, self._client.abort(label=message.label, prefix=message.prefix)))
        elif isinstance(message, SamplesCall):
            self._main.send(Answer(message.call, samples=self._metrics.samples()))
        elif isinstance(message, Attach):
            self._attach(message)
        elif isinstance(message, Detach):
            self._client.detach()
        elif isinstance(message, End):
            self._end()

    def _attach(self, message: Attach) -> None:
        layout = message.layout
        try:
            self._client.attach(message.model, layout, layout.board(), message.hello)
        except (OSError, EngineError) as error:
            # The start may be over already; if it is not, the main process misses our answer and ends this process.
            log.warning("event=attach_failed error=%s", error)
            return
        self._set_state(message)

    def _set_state(self, message: Attach | StateChange) -> None:
        self._client.ready = message.facts
        self._client.set_state(msgspec.convert(message.state, ClientState), message.reason)
        if message.state == "draining" and self._counting is None:
            self._counting = asyncio.get_running_loop().create_task(self._count())
        if message.call:
            self._main.send(Answer(message.call))

    async def _count(self) -> None:
        known = None
        while True:
            if (count := self._client.in_flight) != known:
                known = count
                self._main.send(InFlight(count))
            await asyncio.sleep(COUNT_EVERY_S)


async def _serve(config: WorkerConfig) -> None:
    await _Worker(config).serve()


def main() -> int:
    # The main process decides when a worker ends: a signal to the whole group must not cut what is being drained.
    for number in CHILD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CHILD_SIGNALS)
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        config = msgspec.msgpack.decode(file.read(), type=WorkerConfig)
    name = f"front {config.front}"
    setproctitle.setproctitle(f"engine: {name}")
    setup_logging(config.config.process.log_level, name)
    try:
        die_with_parent(config.parent_pid)
    except EngineError as error:
        log.error("event=fatal error=%s", error)
        return error.exit_code
    raise_file_limit()
    uvloop.run(_serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
