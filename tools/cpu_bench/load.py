"""Closed-loop load over HTTP: streamed OpenAI requests of fixed length, tokens counted by the server's own usage."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence

import aiohttp
import msgspec

_STALL_S = 300.0
# What ends a stream or counts its tokens; all other chunks are only waited for, so that the client costs little.
_TELLING = re.compile(rb'"(?:usage|timings|error)"\s*:\s*\{')


class Target(msgspec.Struct, frozen=True):
    """A server that is up: `url` without a path, and the model name it answers to."""

    url: str
    model: str
    chat: bool = False


class Answer(msgspec.Struct, frozen=True):
    """One request as the client saw it. Times are seconds from sending; counts are the server's."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    error: str = ""


class Level(msgspec.Struct, frozen=True):
    """What one level of concurrency gave. Rates and times leave failed requests out."""

    concurrency: int
    answers: tuple[Answer, ...]
    wall_s: float
    """From the first request's start to the last one's end."""
    output_tokens_wanted: int

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.error]

    @property
    def output_tokens(self) -> int:
        return sum(answer.output_tokens for answer in self.good)

    @property
    def output_rate(self) -> float:
        """Output tokens per second over the whole level."""
        return self.output_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error]

    @property
    def num_misshapen(self) -> int:
        """Answers of another length than the one asked for: the level's rate does not compare then."""
        return sum(answer.output_tokens != self.output_tokens_wanted for answer in self.good)


async def run_level(target: Target, prompts: Sequence[str], concurrency: int, output_tokens: int) -> Level:
    """Send every prompt once, `concurrency` at a time, each asking for exactly `output_tokens`."""
    answers: list[Answer] = []
    waiting = iter(prompts)
    async with session(concurrency) as http:
        start = time.perf_counter()
        workers = [_work(http, target, waiting, output_tokens, answers) for _ in range(min(concurrency, len(prompts)))]
        await asyncio.gather(*workers)
        wall_s = time.perf_counter() - start
    return Level(concurrency, tuple(answers), wall_s, output_tokens)


def session(concurrency: int) -> aiohttp.ClientSession:
    """A client session without limits of its own. llama-server hangs up after a stream, so no connection is reused."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_STALL_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=concurrency, force_close=True))


async def _work(
    http: aiohttp.ClientSession, target: Target, waiting: Iterator[str], output_tokens: int, answers: list[Answer]
) -> None:
    answers += [await ask(http, target, prompt, output_tokens) for prompt in waiting]


async def ask(http: aiohttp.ClientSession, target: Target, prompt: str, output_tokens: int) -> Answer:
    """One streamed request. A failure is an Answer with `error`, never an exception."""
    start = time.perf_counter()
    try:
        route = "/v1/chat/completions" if target.chat else "/v1/completions"
        async with http.post(target.url + route, json=_body(target, prompt, output_tokens)) as response:
            if response.status != 200:
                return _failed(start, f"HTTP {response.status}: {(await response.text())[:200]}")
            return await _read(response, start)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return _failed(start, f"{type(error).__name__}: {error}")


def _body(target: Target, prompt: str, output_tokens: int) -> dict[str, object]:
    asked = {"messages": [{"role": "user", "content": prompt}]} if target.chat else {"prompt": prompt}
    return {
        "model": target.model,
        **asked,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _read(response: aiohttp.ClientResponse, start: float) -> Answer:
    first_text = first_choice = 0.0
    prompt_tokens = output_tokens = cached_tokens = -1
    async for line in response.content:
        if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
            continue
        telling = _TELLING.search(line) is not None
        if first_text and not telling:
            continue
        chunk = json.loads(line[5:])
        if chunk.get("error"):
            return _failed(start, f"in the stream: {str(chunk['error'])[:200]}")
        if not first_text and chunk.get("choices"):
            now = time.perf_counter()
            first_choice = first_choice or now
            first_text = now if _has_text(chunk["choices"][0]) else 0.0
        if telling:
            prompt_tokens, output_tokens, cached_tokens = _counts(chunk)
    end = time.perf_counter()
    if output_tokens < 0:
        return _failed(start, "the stream ended without usage")
    # A single token may be half a character and show no text at all.
    first = first_text or first_choice or end
    return Answer(first - start, end - start, prompt_tokens, output_tokens, cached_tokens)


def _has_text(choice: dict) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


def _counts(chunk: dict) -> tuple[int, int, int]:
    """Prompt, output and cached tokens: of `usage`, else of llama-server's `timings`."""
    usage = chunk.get("usage")
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return usage["prompt_tokens"], usage["completion_tokens"], cached
    timings = chunk["timings"]
    cached = timings.get("cache_n", 0)
    return timings["prompt_n"] + cached, timings["predicted_n"], cached


def _failed(start: float, reason: str) -> Answer:
    return Answer(0.0, time.perf_counter() - start, 0, 0, error=reason)
