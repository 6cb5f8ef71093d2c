"""What has one answer whichever HTTP process is asked: aborts and metrics. The main process answers, workers ask it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from engine.errors import UnavailableError
from engine.ipc.channel import Channel
from engine.ipc.control import AbortCall, MetricsCall, ToWorker
from engine.ipc.messages import Stats

if TYPE_CHECKING:
    from engine.client import EngineClient
    from engine.server.metrics import Metrics
    from engine.workers import Workers

STATS_TIMEOUT_S = 1.0
"""A scrape waits this long for the scheduler's counts and goes on without them."""


class Fronts(Protocol):
    """All HTTP processes of this server."""

    async def abort(self, *, label: str | None = None, prefix: str | None = None) -> int:
        """EngineClient.abort at every front; how many requests these were."""
        ...

    async def metrics(self) -> bytes:
        """The text of /metrics, over all fronts."""
        ...


class MainFront:
    """The main process, with its workers if there are any."""

    def __init__(self, client: EngineClient, metrics: Metrics, workers: Workers | None = None) -> None:
        self._client = client
        self._metrics = metrics
        self._workers = workers

    async def abort(self, *, label: str | None = None, prefix: str | None = None) -> int:
        count = self._client.abort(label=label, prefix=prefix)
        return count if self._workers is None else count + await self._workers.abort(label, prefix)

    async def metrics(self) -> bytes:
        client = self._client
        if self._workers is None:
            stats, others = await self._stats(), []
        else:
            stats, others = await asyncio.gather(self._stats(), self._workers.samples())
        return self._metrics.render(client.model_name, client.health(), stats, others)

    async def _stats(self) -> Stats | None:
        try:
            return await asyncio.wait_for(self._client.stats(), STATS_TIMEOUT_S)
        except (UnavailableError, TimeoutError):
            return None


class WorkerFront:
    """A worker: the main process knows all fronts."""

    def __init__(self, main: Channel[ToWorker]) -> None:
        self._main = main

    async def abort(self, *, label: str | None = None, prefix: str | None = None) -> int:
        return (await self._main.call(lambda call: AbortCall(call, label, prefix))).count

    async def metrics(self) -> bytes:
        return (await self._main.call(MetricsCall)).data
