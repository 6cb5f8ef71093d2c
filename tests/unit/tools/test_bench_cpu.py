"""bench_cpu: what it reports of a server whose delays are known, and what its tables make of that."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tools.cpu_bench.load import Answer, Level, Target, ask, run_level, session
from tools.cpu_bench.measure import Failure, Outcome, Workload, level_outcome, measure, prefill_outcome
from tools.cpu_bench.process import Launch, Server, ServerFailed
from tools.cpu_bench.prompts import Prompts
from tools.cpu_bench.report import summarise, tables, troubles
from tools.cpu_bench.servers import LLAMA_AXES, LLAMA_DEFAULT, Contender, Extra, Llama, Model, Stage

FIRST_S, NEXT_S = 0.06, 0.02
WORDS = tuple(f" word{letter}" for letter in "abcdefghijklmnop")
PROMPTS = Prompts(WORDS)
MODEL = Model("tiny", Path("tiny.gguf"))

# A server of another process: enough of the interface for a start, one level and a stop.
SCRIPT = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self): self.answer(json.dumps({"data": [{"id": "m"}]}).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        usage = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": asked["max_tokens"]}
        first = {"choices": [{"text": "x"}]}
        self.answer(b"".join(b"data: %s\\n\\n" % json.dumps(c).encode() for c in (first, {"usage": usage})))
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("listening", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class FakeServer:
    """Streams known numbers of tokens with known delays; `dialect` says in which server's chunks."""

    def __init__(self, dialect: str = "ours", *, tokens_per_chunk: int = 1, short_by: int = 0) -> None:
        self.dialect = dialect
        self.tokens_per_chunk = tokens_per_chunk
        self.short_by = short_by
        self.bodies: list[dict] = []
        self.running = self.most_running = 0
        self.started: list[float] = []
        self.first: list[float] = []
        self.ended: list[float] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if "refuse" in body.get("prompt", ""):
            return web.json_response({"error": {"message": "no room"}}, status=429)
        self.started.append(time.perf_counter())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = body["max_tokens"] - self.short_by
        null = {"usage": None} if self.dialect == "ours" else {}
        if self.dialect == "chat":
            await self._send(response, {"choices": [{"delta": {"role": "assistant", "content": None}}]})
        for start in range(0, num_tokens, self.tokens_per_chunk):
            await asyncio.sleep(NEXT_S * self.tokens_per_chunk if start else FIRST_S)
            if "break" in body.get("prompt", ""):
                await self._send(response, {"error": {"message": "out of pages"}})
                break
            if start == 0:
                self.first.append(time.perf_counter())
            text = {"delta": {"content": "a"}} if self.dialect == "chat" else {"text": '"usage":{ '}
            await self._send(response, {"choices": [text], **null})
        await self._send(response, self._last(num_tokens))
        self.ended.append(time.perf_counter())
        await response.write(b"data: [DONE]\n\n")
        self.running -= 1
        return response

    def _last(self, num_tokens: int) -> dict:
        if self.dialect == "timings":
            return {"choices": [], "timings": {"prompt_n": 5, "cache_n": 2, "predicted_n": num_tokens}}
        if self.dialect == "nothing":
            return {"choices": [{"text": "", "finish_reason": "length"}]}
        return {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens}}

    async def _send(self, response: web.StreamResponse, chunk: dict) -> None:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@asynccontextmanager
async def serving(fake: FakeServer, *, chat: bool = False) -> AsyncIterator[Target]:
    app = web.Application()
    app.router.add_post("/v1/completions", fake.answer)
    app.router.add_post("/v1/chat/completions", fake.answer)
    async with TestServer(app) as server:
        yield Target(str(server.make_url("")).rstrip("/"), "m", chat)


async def one(fake: FakeServer, prompt: str = "p", output_tokens: int = 4, *, chat: bool = False) -> Answer:
    async with serving(fake, chat=chat) as target, session(1) as http:
        return await ask(http, target, prompt, output_tokens)


async def test_ttft_and_rate_are_those_of_the_server() -> None:
    fake = FakeServer()
    async with serving(fake) as target:
        level = await run_level(target, PROMPTS.texts("k", 8, 5), 4, 6)
    assert level.errors == [] and level.num_misshapen == 0
    assert level.output_tokens == 8 * 6
    assert fake.most_running == 4
    # A busy machine may be late: what counts is that the client sees what the server did.
    served_s = max(fake.ended) - min(fake.started)
    assert 0.8 * 48 / served_s < level.output_rate <= 48 / served_s
    assert level.output_rate <= 48 / (2 * (FIRST_S + 5 * NEXT_S)) * 1.01
    ttft_s = statistics.median(first - started for started, first in zip(fake.started, fake.first, strict=True))
    assert ttft_s <= statistics.median(answer.ttft_s for answer in level.answers) < ttft_s + FIRST_S / 2
    assert len({body["prompt"] for body in fake.bodies}) == 8
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["stream"] for body in fake.bodies)


@pytest.mark.parametrize(("dialect", "cached"), [("ours", 0), ("vllm", 0), ("timings", 2), ("chat", 0)])
async def test_tokens_are_the_servers_own_count_not_the_chunks(dialect: str, cached: int) -> None:
    answer = await one(FakeServer(dialect, tokens_per_chunk=2), chat=dialect == "chat")
    assert (answer.error, answer.output_tokens, answer.prompt_tokens, answer.cached_tokens) == ("", 4, 7, cached)
    # A chat's role comes before there is any token.
    assert answer.ttft_s >= 0.99 * FIRST_S


@pytest.mark.parametrize(
    ("dialect", "prompt", "reason"),
    [("ours", "refuse", "HTTP 429"), ("ours", "break", "out of pages"), ("nothing", "p", "without usage")],
)
async def test_a_failed_request_is_counted_and_says_why(dialect: str, prompt: str, reason: str) -> None:
    answer = await one(FakeServer(dialect), prompt)
    assert reason in answer.error


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with session(1) as http:
        answer = await ask(http, Target("http://127.0.0.1:9", "m"), "p", 1)
    assert answer.error


async def test_errors_and_wrong_lengths_reach_the_report() -> None:
    stage = Stage(2, 5, 3)
    async with serving(FakeServer(short_by=1)) as target:
        outcome = level_outcome(stage, await run_level(target, ["p", "refuse", "q"], 2, 3), 0)
    assert (outcome.requests, len(outcome.errors), outcome.misshapen) == (3, 1, 2)
    told = "\n".join(troubles([msgspec.structs.replace(outcome, others_cores=0.5)], [], []))
    assert "others used 0.50 cores" in told
    assert "1 of 3 requests failed (HTTP 429" in told and "2 answers of the wrong length" in told


def test_prefill_is_prompt_tokens_over_the_time_to_the_first_token() -> None:
    answers = [
        Answer(0.5, 0.6, 1000, 1),
        Answer(0.25, 0.3, 1000, 1),
        Answer(1.0, 1.1, 1000, 1),
        Answer(0, 0, 0, 0, 0, "x"),
    ]
    outcome = prefill_outcome(Stage(1, 1000, 1, prefill=True), answers, 0)
    assert (outcome.rate, outcome.ttft_p50_s, len(outcome.errors)) == (2000.0, 0.5, 1)


def test_prompts_are_distinct_and_repeatable() -> None:
    texts = PROMPTS.texts("k", 20, 12)
    assert texts == Prompts(WORDS).texts("k", 20, 12)
    assert len(set(texts)) == 20 and all(len(text.split()) == 12 for text in texts)


def outcome_of(name: str, stage: str, turn: int, rate: float, **more: object) -> Outcome:
    base = level_outcome(Stage(1, 5, 2), Level(1, (Answer(0.1, 0.2, 5, 2),), 1.0, 2), turn)
    return msgspec.structs.replace(base, contender=name, stage=stage, rate=rate, **more)


def test_ratios_are_taken_within_a_round() -> None:
    rates = {"ours": (100.0, 50.0, 80.0), "peer": (50.0, 25.0, 20.0)}
    outcomes = [outcome_of(name, "8", turn, rate) for name, all_ in rates.items() for turn, rate in enumerate(all_)]
    summary = summarise(outcomes, [("ours", "peer"), ("ours", "absent")])
    assert [(r.ratio.median, r.ratio.low, r.ratio.high) for r in summary.ratios] == [(2.0, 2.0, 4.0)]
    assert (summary.rate["ours"]["8"].median, summary.rate["peer"]["8"].low) == (80.0, 20.0)


def test_tables_name_rows_ratios_and_processes() -> None:
    cpu = {"front": 1.0, "scheduler": 3.0}
    outcomes = [
        outcome_of("ours", "prefill", 0, 900.0),
        outcome_of("ours", "8", 0, 30.0, cpu_s=cpu, idle_share={"front": 0.01}),
        outcome_of("peer", "8", 0, 20.0),
    ]
    text = tables(summarise(outcomes, [("ours", "peer")]), ["prefill", "8"], "8")
    for expected in ("ours / peer", "1.50", "scheduler", "75.0%", "idle CPU use", "900"):
        assert expected in text
    told = troubles(outcomes, [Failure("peer", 1, ("8",), "gone")], ["vllm: absent"])
    assert told == ["skipped: vllm: absent", "failed: peer, round 2, 8: gone"]


def test_extra_words_split_into_environment_and_arguments() -> None:
    extra = Extra.parse("A=1 B='x y' --flag C=2").plus(Extra.parse("--more"))
    assert extra == Extra(("--flag", "C=2", "--more"), (("A", "1"), ("B", "x y")))


def test_llama_takes_swept_settings_by_stage_and_given_arguments_instead() -> None:
    one_, eight = Stage(1, 64, 96), Stage(8, 64, 96)
    server = Path("llama-server")
    swept = Llama("llama", MODEL, server, Extra(), {"8": {"threads": "1", "unknown": "x"}})
    assert swept.choices(one_) == dict(LLAMA_DEFAULT)
    command = swept.launch(eight).command
    assert command[command.index("-np") + 1] == "8" and command[command.index("-c") + 1] == str(8 * 256)
    assert LLAMA_AXES["threads"]["1"].split() == list(command[command.index("-t") : command.index("-t") + 4])
    passive = Llama("llama", MODEL, server, Extra(), {"8": {"waiting": "passive"}})
    assert passive.launch(eight).env == (("OMP_WAIT_POLICY", "passive"),)
    given = Llama("llama", MODEL, server, Extra.parse("-t 7"))
    assert given.launch(one_).command[-2:] == ("-t", "7") and "-fa" not in given.launch(one_).command


class Scripted(Contender):
    """The server of SCRIPT, or a command that ends at once."""

    ours = True

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__("scripted", MODEL, Path(sys.executable), Extra())
        self._arguments = arguments

    def launch(self, stage: Stage) -> Launch:
        return Launch((sys.executable, "-S", *self._arguments), start_timeout_s=20.0)


def measured(server: Contender, workload: Workload, logs: Path) -> tuple[list[Outcome], list[Failure]]:
    found = list(measure(server, workload, 0, logs, idle=True))
    return [one for one in found if isinstance(one, Outcome)], [one for one in found if isinstance(one, Failure)]


def test_a_server_is_started_measured_and_gone(tmp_path: Path) -> None:
    workload = Workload((Stage(1, 5, 1, prefill=True), Stage(2, 5, 3)), (1, 2), PROMPTS, cpu_stage="2", idle_s=0.05)
    outcomes, failures = measured(Scripted(["-c", SCRIPT, "{port}"]), workload, tmp_path)
    assert not failures
    assert [outcome.stage for outcome in outcomes] == ["prefill", "2"]
    assert outcomes[1].prompt_tokens == 5 and not outcomes[1].misshapen
    assert set(outcomes[1].cpu_s) == {"front", "client"} and set(outcomes[1].idle_share) == {"front"}


def test_a_server_that_ends_says_why_and_costs_only_its_stages(tmp_path: Path) -> None:
    script = "import sys; print('no such model'); sys.exit(3)"
    outcomes, failures = measured(Scripted(["-c", script]), Workload((Stage(1, 5, 3),), (1,), PROMPTS), tmp_path)
    assert not outcomes and failures[0].stages == ("1",)
    assert "status 3" in failures[0].reason and "no such model" in failures[0].reason


def test_a_stage_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    workload = Workload((Stage(1, 5, 3),), (1,), PROMPTS, stage_timeout_s=0.0)
    outcomes, failures = measured(Scripted(["-c", SCRIPT, "{port}"]), workload, tmp_path)
    assert not outcomes and "not done with 1 after 0 s" in failures[0].reason


def test_a_stopped_server_leaves_no_process(tmp_path: Path) -> None:
    child = "import os, time; os.fork() or time.sleep(60);"
    with Server(Launch((sys.executable, "-S", "-c", child + SCRIPT, "{port}")), tmp_path / "log") as server:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        assert len(family) == 2
    for process in family:
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_command_that_is_not_there_fails_to_start(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="cannot run"), Server(Launch(("/nowhere/serve",)), tmp_path / "log"):
        pass
