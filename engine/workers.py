"""The HTTP workers of --http-workers, seen from the main process: start, connections, what all fronts do together."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
from collections import defaultdict
from collections.abc import Awaitable, Callable

import msgspec

from engine.client import ClientState, EngineClient
from engine.errors import EngineError, UnavailableError
from engine.ipc.channel import CALL_TIMEOUT_S, Channel
from engine.ipc.child import Layout
from engine.ipc.control import (
    AbortCall,
    Answer,
    Attach,
    Detach,
    End,
    FailAll,
    FromWorker,
    InFlight,
    MetricsCall,
    Sample,
    SamplesCall,
    StateChange,
    WorkerConfig,
)
from engine.ipc.messages import Hello, Ready
from engine.model_files.types import ModelFiles
from engine.spawn import how_it_ended, spawn

log = logging.getLogger(__name__)

MODULE = "engine.server.worker"
HUNG_S = 3.0
"""A worker that is silent for so long gets no new connections."""
SAMPLES_TIMEOUT_S = 1.0
"""A scrape waits this long for a worker's counts and goes on with what it knew before."""
END_TIMEOUT_S = 5.0
"""Seconds a worker may take to end before SIGKILL."""


class Worker:
    """One HTTP worker: its process, the channel to it, and the socket that its connections go over."""

    def __init__(self, front: int) -> None:
        self.front = front
        self.name = f"front {front}"
        self.life = -1
        self.process: subprocess.Popen[bytes] | None = None
        self.serves = False
        """It has attached and knows the server's state: connections may be given to it."""
        self.in_flight: int | None = None
        """While draining: its last report."""
        self.samples: list[Sample] = []
        """What it had counted when it was last asked."""
        self._pidfd = -1
        self._channel: Channel[FromWorker] | None = None
        self._connections: socket.socket | None = None

    async def start(
        self, config: WorkerConfig, receive: Callable[[FromWorker], None], on_exit: Callable[[Worker], None]
    ) -> None:
        """Start the process. `on_exit` is called once it has ended. Raises OSError."""
        control, its_control = socket.socketpair()
        connections, its_connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_control, its_connections:
            fds = its_control.fileno(), its_connections.fileno()
            config = msgspec.structs.replace(config, control_fd=fds[0], connections_fd=fds[1])
            self.process = spawn(MODULE, config, fds)
        connections.setblocking(False)
        self._connections = connections
        self._channel = Channel(FromWorker, receive, lambda: None)
        self._pidfd = os.pidfd_open(self.process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, on_exit, self)
        await self._channel.connect(control)

    def send(self, message: msgspec.Struct) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def call(self, message: Callable[[int], msgspec.Struct], timeout_s: float = CALL_TIMEOUT_S) -> Answer | None:
        """The answer to a call; None if there is none."""
        if self._channel is None:
            return None
        try:
            return await self._channel.call(message, timeout_s)
        except UnavailableError:
            return None

    def hand_over(self, connection: socket.socket) -> bool:
        """Give it an accepted connection; False if it takes none now."""
        if self._connections is None:
            return False
        try:
            socket.send_fds(self._connections, [b"c"], [connection.fileno()])
        except OSError:
            return False
        return True

    def forget(self) -> int:
        """Let go of an ended process; its return code."""
        assert self.process is not None and self._connections is not None and self._channel is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._connections.close()
        self._channel.close()
        status = self.process.wait()
        self.process = self._connections = self._channel = None
        self.serves = False
        self.in_flight = None
        return status


class Workers:
    """All HTTP workers but the main process itself; none with --http-workers 1. Follows the main process's client."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._workers = [Worker(front) for front in range(1, client.config.http.http_workers)]
        self.on_death: Callable[[Worker, str], None] = lambda worker, how: None
        """Told of a worker that ended without being asked to, and how it did."""
        self.render: Callable[[], Awaitable[bytes]] | None = None
        """Makes the text of /metrics for workers that are asked for it."""
        self._attached: Attach | None = None
        self._retired: defaultdict[tuple[str, frozenset[tuple[str, str]]], float] = defaultdict(float)
        """What workers had counted that have died."""
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        client.followers.append(self)

    # -- life -----------------------------------------------------------------------------------------------------

    async def start_missing(self) -> None:
        """Start every worker that does not run. Raises OSError."""
        for worker in self._workers:
            if worker.process is not None or self._ending:
                continue
            worker.life += 1
            config = WorkerConfig(
                worker.front, worker.life, os.getpid(), self._client.created, self._client.config, -1, -1
            )
            await worker.start(config, lambda message, worker=worker: self._receive(worker, message), self._on_exit)
            if self._attached is not None:
                self._send_attach(worker)

    async def end(self) -> None:
        """Have all workers send what waits to be sent, and end; SIGKILL for those that take too long."""
        self._ending = True
        running = [worker for worker in self._workers if worker.process is not None]
        for worker in running:
            worker.send(End())
        deadline = asyncio.get_running_loop().time() + END_TIMEOUT_S
        while any(worker.process is not None for worker in running):
            if asyncio.get_running_loop().time() > deadline:
                for worker in running:
                    if worker.process is not None:
                        log.error("event=kill name=%r: it did not end in time", worker.name)
                        worker.process.kill()
                        worker.process.wait()
                        worker.forget()
            await asyncio.sleep(0.01)

    def _on_exit(self, worker: Worker) -> None:
        self._client.ready.pop(worker.name, None)
        self._client.mark_down(worker.front)
        for name, labels, value in worker.samples:
            self._retired[name, frozenset(labels.items())] += value
        worker.samples = []
        how = how_it_ended(worker.forget())
        if not self._ending:
            self.on_death(worker, how)

    # -- what the main process's client does ----------------------------------------------------------------------

    def attach(self, model: ModelFiles, layout: Layout, hello: Hello) -> None:
        self._attached = Attach(model, layout, hello)
        for worker in self._workers:
            self._send_attach(worker)

    def _send_attach(self, worker: Worker) -> None:
        assert self._attached is not None
        hello = msgspec.structs.replace(self._attached.hello, sender=worker.name)
        worker.send(msgspec.structs.replace(self._attached, hello=hello))

    def detach(self) -> None:
        self._attached = None
        for worker in self._workers:
            worker.send(Detach())

    def set_state(self, state: ClientState, reason: str) -> None:
        for worker in self._workers:
            worker.send(StateChange(0, state, reason, self._client.ready))

    def fail_all(self, error: EngineError) -> None:
        for worker in self._workers:
            worker.send(FailAll(error.info()))

    async def tell_ready(self) -> None:
        """Have every worker take requests, before the main process says that the server is ready."""
        await asyncio.gather(*(self._tell_state(worker, "ready", "") for worker in self._workers))

    async def _tell_state(self, worker: Worker, state: ClientState, reason: str) -> bool:
        answer = await worker.call(lambda call: StateChange(call, state, reason, self._client.ready))
        return answer is not None

    # -- connections ----------------------------------------------------------------------------------------------

    def takers(self) -> list[Worker]:
        """Workers that new connections may be given to."""
        return [
            worker for worker in self._workers if worker.serves and not self._client.is_silent(worker.front, HUNG_S)
        ]

    # -- what all fronts do together ------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """While draining: requests that workers still serve; one for a worker that has not said so yet."""
        return sum(1 if worker.in_flight is None else worker.in_flight for worker in self._workers if worker.process)

    async def until_counted(self, timeout_s: float) -> None:
        """While draining: wait until every worker has said what it still serves, or the time is over."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while any(worker.process is not None and worker.in_flight is None for worker in self._workers):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(0.01)

    async def abort(self, label: str | None, prefix: str | None) -> int:
        """EngineClient.abort at all workers; how many requests these were."""
        answers = await asyncio.gather(
            *(worker.call(lambda call: AbortCall(call, label, prefix)) for worker in self._workers)
        )
        return sum(answer.count for answer in answers if answer is not None)

    async def samples(self) -> list[Sample]:
        """What all workers have counted, those that have died included; without an answer, what was known before."""

        async def ask(worker: Worker) -> None:
            life = worker.life
            answer = await worker.call(SamplesCall, SAMPLES_TIMEOUT_S)
            if answer is not None and worker.process is not None and worker.life == life:
                worker.samples = answer.samples

        await asyncio.gather(*(ask(worker) for worker in self._workers))
        retired = [(name, dict(labels), value) for (name, labels), value in self._retired.items()]
        return retired + [sample for worker in self._workers for sample in worker.samples]

    # -- messages -------------------------------------------------------------------------------------------------

    def _receive(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Ready):
            self._do(self._on_ready(worker, message))
        elif isinstance(message, InFlight):
            worker.in_flight = message.count
        elif isinstance(message, AbortCall):
            self._do(self._answer_abort(worker, message))
        elif isinstance(message, MetricsCall):
            self._do(self._answer_metrics(worker, message))

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_ready(self, worker: Worker, message: Ready) -> None:
        """It has attached; it serves once it knows the state too."""
        if self._attached is None or message.facts != {"run_dir": self._attached.layout.run_dir}:
            return  # to the processes of an earlier start
        if await self._tell_state(worker, self._client.state, self._client.reason):
            worker.serves = True
            self._client.on_process_ready(message)

    async def _answer_abort(self, worker: Worker, call: AbortCall) -> None:
        count = self._client.abort(label=call.label, prefix=call.prefix) + await self.abort(call.label, call.prefix)
        worker.send(Answer(call.call, count))

    async def _answer_metrics(self, worker: Worker, call: MetricsCall) -> None:
        if self.render is not None:
            worker.send(Answer(call.call, data=await self.render()))
