"""The HTTP workers of --http-workers, seen from the main process: start, connections, what all fronts do together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections import defaultdict
from collections.abc import Awaitable, Callable

import msgspec

from engine.client import ClientState, EngineClient
from engine.errors import EngineError, UnavailableError
from engine.ipc.board import State
from engine.ipc.channel import Channel
from engine.ipc.child import Layout
from engine.ipc.control import (
    AbortCall,
    Answer,
    Attach,
    Detach,
    End,
    FailAll,
    FromWorker,
    Full,
    InFlight,
    MetricsCall,
    Sample,
    SamplesCall,
    StateChange,
    WorkerConfig,
)
from engine.ipc.messages import Hello, Ready
from engine.model_files.types import ModelFiles
from engine.spawn import MAX_RESTARTS, RESTART_WINDOW_S, RestartBudget, how_it_ended, spawn

log = logging.getLogger(__name__)

MODULE = "engine.server.worker"
HUNG_S = 1.0
"""A worker that is silent for so long gets no new connections. A false alarm is harmless: others get them."""
LOST_S = 5.0
"""One that is silent for so long is no longer reckoned with: no abort is sent to it, no drain waits for it."""
ATTACH_TIMEOUT_S = 5.0
"""Seconds a worker that has served before may take to take up new processes before SIGKILL; a new one has
--start-timeout. All that is lost is its connections, whose requests have failed already."""
READY_TIMEOUT_S = 1.0
"""The server is ready without workers that have not confirmed by then that they know."""
ABORT_TIMEOUT_S = 1.0
"""Less than a channel's own limit: the worker that was asked for the abort waits for the others' counts."""
SAMPLES_TIMEOUT_S = 1.0
"""A scrape waits this long for a worker's counts and goes on with what it knew before."""
FIRST_PAUSE_S = 0.5
"""A worker that died again is started after this pause, twice as long each time; the first time at once."""
LONGEST_PAUSE_S = 8.0
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
        self.full = False
        """It has said that it has too few descriptors left for more."""
        self.budget = RestartBudget()
        self.given_up = False
        """It died too often: the server goes on without it."""
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
        """Start the process. `on_exit` is called once it has ended. Raises OSError, and then there is none."""
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as its:
                control, its_control = socket.socketpair()
                ours.enter_context(control)
                its.enter_context(its_control)
                connections, its_connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.enter_context(connections)
                its.enter_context(its_connections)
                fds = its_control.fileno(), its_connections.fileno()
                config = msgspec.structs.replace(config, control_fd=fds[0], connections_fd=fds[1])
                process = spawn(MODULE, config, fds)
            try:
                self._pidfd = os.pidfd_open(process.pid)
            except OSError:
                process.kill()
                process.wait()
                raise
            ours.pop_all()
        self.life += 1
        self.process = process
        connections.setblocking(False)
        self._connections = connections
        self._channel = Channel(FromWorker, receive, lambda: None)
        asyncio.get_running_loop().add_reader(self._pidfd, on_exit, self)
        await self._channel.connect(control)

    def send(self, message: msgspec.Struct) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def call(self, message: Callable[[int], msgspec.Struct], timeout_s: float) -> Answer | None:
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
        self.serves = self.full = False
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
        self._attached: tuple[ModelFiles, Layout, Hello] | None = None
        self._retired: defaultdict[tuple[str, frozenset[tuple[str, str]]], float] = defaultdict(float)
        """What workers had counted that have died."""
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        client.followers.append(self)

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all workers. Raises OSError."""
        for worker in self._workers:
            await self._start(worker)

    async def _start(self, worker: Worker) -> None:
        client, life = self._client, worker.life + 1
        config = WorkerConfig(worker.front, life, os.getpid(), client.created, client.config, -1, -1)
        await worker.start(config, lambda message: self._receive(worker, message), self._on_exit)
        if self._attached is not None and worker.life == life:
            self._do(self._attach(worker))

    def start_again(self, worker: Worker) -> None:
        """Start a worker that died, or go on without it if it died too often."""
        number = worker.budget.take()
        if number == 0:
            log.error(
                "event=restart_given_up name=%r restarts=%d window_s=%d", worker.name, MAX_RESTARTS, RESTART_WINDOW_S
            )
            worker.given_up = True
            self._client.mark(worker.front, State.GIVEN_UP)
            return
        log.warning("event=restart name=%r number=%d", worker.name, number)
        self._do(self._start_after(worker, 0.0 if number == 1 else FIRST_PAUSE_S * 2 ** (number - 2)))

    async def _start_after(self, worker: Worker, pause_s: float) -> None:
        """Start a worker after a pause, and after longer ones for as long as the machine has no room for it."""
        while True:
            await asyncio.sleep(pause_s)
            if self._ending or self._client.state not in ("ready", "restarting"):
                return
            try:
                await self._start(worker)
            except OSError as error:
                pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                log.error("event=restart_failed name=%r next_in_s=%g error=%s", worker.name, pause_s, error)
            else:
                return

    async def end(self) -> None:
        """Have all workers send what waits to be sent, and end; SIGKILL for those that are late or never served."""
        self._ending = True
        running = [worker for worker in self._workers if worker.process is not None]
        for worker in running:
            if worker.serves:
                worker.send(End())
            elif worker.process is not None:
                worker.process.kill()
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
        self._client.mark(worker.front, State.STARTING)
        for name, labels, value in worker.samples:
            self._retired[name, frozenset(labels.items())] += value
        worker.samples = []
        how = how_it_ended(worker.forget())
        if not self._ending:
            self.on_death(worker, how)

    # -- what the main process's client does ----------------------------------------------------------------------

    def attach(self, model: ModelFiles, layout: Layout, hello: Hello) -> None:
        self._attached = model, layout, hello
        for worker in self._workers:
            if worker.process is not None:
                self._do(self._attach(worker))
            elif worker.given_up:
                self._client.mark(worker.front, State.GIVEN_UP)

    async def _attach(self, worker: Worker) -> None:
        """Have a worker take up the present processes; SIGKILL if it does not."""
        client, start, process = self._client, self._attached, worker.process
        if start is None or process is None:
            return
        model, layout, hello = start
        hello = msgspec.structs.replace(hello, sender=worker.name)
        answer = await worker.call(
            lambda call: Attach(call, model, layout, hello, client.state, client.reason, client.ready),
            ATTACH_TIMEOUT_S if worker.serves else client.config.process.start_timeout,
        )
        if self._attached is not start or worker.process is not process:
            return  # that start is over, or that worker
        if answer is not None:
            worker.serves = True
            client.on_process_ready(Ready(worker.name, {}))
        elif process.poll() is None:
            log.error("event=kill name=%r: it did not take up the processes in time", worker.name)
            process.kill()

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
        """Have every worker take requests, before the main process says that the server is ready.

        One that has not attached yet gets no connections meanwhile, and hears the state then.
        """

        def ready(call: int) -> StateChange:
            return StateChange(call, "ready", "", self._client.ready)

        await asyncio.gather(*(worker.call(ready, READY_TIMEOUT_S) for worker in self._responsive()))

    # -- connections ----------------------------------------------------------------------------------------------

    def takers(self) -> list[Worker]:
        """Workers that new connections may be given to."""
        return [worker for worker in self._responsive() if not worker.full]

    def _responsive(self) -> list[Worker]:
        """Workers that serve and are not silent."""
        return [
            worker for worker in self._workers if worker.serves and not self._client.is_silent(worker.front, HUNG_S)
        ]

    # -- what all fronts do together ------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """While draining: requests that workers still serve, by their reports or else by the board."""
        client = self._client
        return sum(
            client.work_of(worker.front) if worker.in_flight is None else worker.in_flight
            for worker in self._workers
            if worker.serves and not client.is_silent(worker.front, LOST_S)
        )

    async def until_counted(self, timeout_s: float) -> None:
        """While draining: wait until every worker that is not silent has said what it still serves, or time is over."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while any(worker.in_flight is None for worker in self._responsive()):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(0.01)

    async def abort(self, label: str | None, prefix: str | None) -> int:
        """EngineClient.abort at all workers that are not lost; how many requests these were, as far as they answer."""
        answers = await asyncio.gather(
            *(
                worker.call(lambda call: AbortCall(call, label, prefix), ABORT_TIMEOUT_S)
                for worker in self._workers
                if not self._client.is_silent(worker.front, LOST_S)
            )
        )
        return sum(answer.count for answer in answers if answer is not None)

    async def samples(self) -> list[Sample]:
        """What all workers have counted, those that have died included; without an answer, what was known before."""

        async def ask(worker: Worker) -> None:
            life = worker.life
            answer = await worker.call(SamplesCall, SAMPLES_TIMEOUT_S)
            if answer is not None and worker.process is not None and worker.life == life:
                worker.samples = answer.samples

        await asyncio.gather(*(ask(worker) for worker in self._responsive()))
        retired = [(name, dict(labels), value) for (name, labels), value in self._retired.items()]
        return retired + [sample for worker in self._workers for sample in worker.samples]

    # -- messages -------------------------------------------------------------------------------------------------

    def _receive(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, InFlight):
            worker.in_flight = message.count
        elif isinstance(message, Full):
            log.warning("event=full name=%r full=%s reason='too few descriptors left'", worker.name, message.full)
            worker.full = message.full
        elif isinstance(message, AbortCall):
            self._do(self._answer_abort(worker, message))
        elif isinstance(message, MetricsCall):
            self._do(self._answer_metrics(worker, message))

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_abort(self, worker: Worker, call: AbortCall) -> None:
        count = self._client.abort(label=call.label, prefix=call.prefix) + await self.abort(call.label, call.prefix)
        worker.send(Answer(call.call, count))

    async def _answer_metrics(self, worker: Worker, call: MetricsCall) -> None:
        if self.render is not None:
            worker.send(Answer(call.call, data=await self.render()))
