"""Sends requests and times their streams: the inside of one client process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from http import HTTPStatus

import aiohttp
import msgspec

from engine.bench.events import AnswerReader
from engine.bench.job import ROUTES, Ask, Job, Outcome, Record, Target

_INDEX_BYTES = 4
_TOUCH_S = 5.0
_clock = time.monotonic


async def run_job(job: Job, queue: int, ready: Callable[[], float], finished: Callable[[], None]) -> Outcome:
    """Take requests from `queue` until it is empty.

    queue: a file descriptor of little-endian uint32 indices into `job.asks`. All client processes inherit it, and with
    it one file offset: a read takes an index from all of them. ready: called once, waits for and returns the time
    (CLOCK_MONOTONIC) before which no request is sent. finished: called after each request.
    """
    async with session(job) as http:
        await _touch(http, job.target)
        start = ready()
        await asyncio.sleep(start - _clock())
        began, cpu = _clock(), time.process_time()
        takers = [_take(http, job, queue, start, finished) for _ in range(job.concurrency)]
        taken = await asyncio.gather(*takers)
        busy = (time.process_time() - cpu) / max(_clock() - began, 1e-9)
    return Outcome([record for records in taken for record in records], busy)


def session(job: Job) -> aiohttp.ClientSession:
    """Each request has a connection of its own, as requests of many users do."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=job.timeout_s),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        headers=headers(job.target),
    )


def headers(target: Target) -> dict[str, str]:
    """Of every request."""
    key = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    return {"Content-Type": "application/json", **key}


async def _touch(http: aiohttp.ClientSession, target: Target) -> None:
    """Ask something small, whatever the answer: a process's first request takes milliseconds longer than the next."""
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async with http.get(f"{target.base_url}/v1/models", timeout=aiohttp.ClientTimeout(_TOUCH_S)) as response:
            await response.read()


async def _take(
    http: aiohttp.ClientSession, job: Job, queue: int, start: float, finished: Callable[[], None]
) -> list[Record]:
    records = []
    while index := os.read(queue, _INDEX_BYTES):
        request = job.asks[int.from_bytes(index, "little")]
        body = encode_body(job, request)
        wait_s = start + request.arrival_s - _clock()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        records.append(await ask(http, job, request, body))
        finished()
    return records


def encode_body(job: Job, request: Ask) -> bytes:
    """The JSON of a request in its endpoint's words."""
    if job.target.endpoint == "generate":
        name = "text" if isinstance(request.prompt, str) else "input_ids"
        sampling = {
            "max_new_tokens": request.output_len,
            "temperature": job.temperature,
            "ignore_eos": job.ignore_eos,
        }
        return msgspec.json.encode({name: request.prompt, "sampling_params": sampling, "stream": True})
    if job.target.endpoint == "chat":
        asked: dict[str, object] = {"messages": [{"role": "user", "content": request.prompt}]}
    else:
        asked = {"prompt": request.prompt}
    # Servers that do not know ignore_eos may refuse it, so it is only sent where it is wanted.
    ends = {"ignore_eos": True} if job.ignore_eos else {}
    return msgspec.json.encode(
        {
            "model": job.target.model,
            **asked,
            "max_tokens": request.output_len,
            "temperature": job.temperature,
            **ends,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def ask(http: aiohttp.ClientSession, job: Job, request: Ask, body: bytes) -> Record:
    """One streamed request. A failure is a Record with `error`, never an exception."""
    reader, arrivals = AnswerReader(job.target.endpoint), list[float]()
    url = job.target.base_url + ROUTES[job.target.endpoint]
    name = {"x-request-id": f"{job.run_id}-{request.index}"}
    answered = False
    sent = _clock()
    try:
        async with http.post(url, data=body, headers=name) as response:
            answered = True
            if response.status != HTTPStatus.OK:
                kind, message = f"status {response.status}", (await response.text())[:500]
            else:
                end = await _read(response.content, reader, arrivals)
                kind, message = _failure(reader)
    except TimeoutError:
        kind, message = "timeout", f"no end within {job.timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        kind = "broken stream" if answered else "connection"
        message = f"{type(error).__name__}: {error}"
    if kind:
        return Record(request.index, sent, _clock(), arrivals, reader.num_chunks, error=kind, message=message)
    counts = reader.counts()
    assert counts is not None
    return Record(request.index, sent, end, arrivals, reader.num_chunks, *counts)


async def _read(content: aiohttp.StreamReader, reader: AnswerReader, arrivals: list[float]) -> float:
    """Until the answer is done, failed, or its connection at its end; returns when."""
    while data := await content.readany():
        now = _clock()
        if reader.feed(data):
            arrivals.append(now)
        if reader.done or reader.error is not None:
            return now
    return _clock()


def _failure(reader: AnswerReader) -> tuple[str, str]:
    """Kind and message of what is wrong with a stream that was read; both empty if nothing is."""
    if reader.error is not None:
        return "error event", reader.error
    if not reader.done:
        return "broken stream", "it ended without [DONE]"
    try:
        known = reader.counts() is not None
    except ValueError as error:
        return "no usage", str(error)
    return ("", "") if known else ("no usage", "the stream did not say how many tokens it has")
