"""The command line of tools/bench_serving.py."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
import urllib.request
from pathlib import Path
from typing import get_args

import msgspec
from tqdm import tqdm

from engine.bench.datasets import Dataset, Lengths, Workload, make_asks, parse_lengths
from engine.bench.job import ROUTES, BenchError, Endpoint, Job, Outcome, Target
from engine.bench.load import run_load
from engine.bench.options import count
from engine.bench.report import Summary, describe, parse_goals, row, summarise
from engine.bench.self_test import describe as describe_self_test
from engine.bench.self_test import self_test
from engine.bench.timeline import timeline

KEY_VARIABLE = "ENGINE_API_KEY"
_LEAST_WITHIN = 0.95
"""Share of the self-test's times that must be right: a machine is never quite quiet."""
_LOOKUP_S = 10.0
DESCRIPTION = """Measures a running server: sends streamed requests, and times them by this side's clock.

    bench_serving.py --dataset random-ids --input-len 512 --output-len 256 --num-prompts 128 --concurrency 32
    bench_serving.py --dataset sharegpt-file --dataset-path FILE --request-rate 4 --goodput ttft:500 tpot:50

TTFT: time to the first text. ITL: gaps between arrivals of text; chunks that are read together arrived together.
TPOT: (end - first text) / (output tokens - 1), per request. E2E: from sending to the end of the stream. Counts of
tokens are the server's own (usage), never numbers of chunks. Waiting for a place under --concurrency is not part of
any time. The exit status is 1 if a request failed.
"""


def parser() -> argparse.ArgumentParser:
    """All options."""
    found = argparse.ArgumentParser(
        prog="bench_serving.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    server = found.add_argument_group("the server")
    server.add_argument("--base-url", default="http://127.0.0.1:30000", help="without a path; default: %(default)s")
    server.add_argument("--model", help="name to ask for; default: the first that /v1/models lists")
    server.add_argument("--endpoint", choices=get_args(Endpoint), default="completions", help="default: %(default)s")
    server.add_argument("--api-key", help=f"default: the environment variable {KEY_VARIABLE}, where nobody reads it")
    load = found.add_argument_group("the load")
    load.add_argument("--num-prompts", type=count, default=128, help="requests; default: %(default)s")
    load.add_argument(
        "--request-rate", type=_rate, default=float("inf"), help="Poisson arrivals a second; inf: no wait"
    )
    load.add_argument("--concurrency", type=count, help="most requests at a time; default: no limit")
    load.add_argument("--processes", type=count, default=1, help="client processes; more for many streams")
    load.add_argument("--warmup", type=int, default=0, help="requests before that count for nothing; default: none")
    load.add_argument("--timeout", type=float, default=600.0, help="seconds for a whole request; default: %(default)g")
    load.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    prompts = found.add_argument_group("prompts and answers")
    prompts.add_argument(
        "--dataset",
        choices=get_args(Dataset),
        default="random",
        help="random: words; random-ids: token ids; shared-prefix: one prefix, then --input-len of each prompt's own"
        " (ids, with chat words); sharegpt-file: a JSON file of conversations",
    )
    prompts.add_argument("--dataset-path", type=Path, help="the file of sharegpt-file")
    prompts.add_argument("--input-len", type=parse_lengths, default="512", help="tokens, or A:B uniform; words are ~1")
    prompts.add_argument("--output-len", type=parse_lengths, help="tokens, or A:B; default: 128, or as in the file")
    prompts.add_argument("--shared-prefix-len", type=count, default=2048, help="tokens; default: %(default)s")
    prompts.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    prompts.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers have just --output-len tokens; default: on",
    )
    report = found.add_argument_group("the report")
    report.add_argument("--goodput", nargs="+", default=[], metavar="GOAL:MS", help="ttft:200 tpot:20 e2el:5000")
    report.add_argument("--json", type=Path, help="write summary and every request to this file")
    report.add_argument("--plot", type=Path, help="draw the load over time as SVG")
    report.add_argument("--quiet", action="store_true", help="no progress bar")
    report.add_argument("--self-test", action="store_true", help="measure a built-in server whose times are known")
    return found


def _rate(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is no rate above 0")
    return float(text)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    options_parser = parser()
    options = options_parser.parse_args(arguments)
    try:
        if options.self_test:
            return run_self_test()
        goals = parse_goals(options.goodput)
        _refuse(options)
        summary, outcome = bench(options, goals)
    except (BenchError, ValueError) as error:
        options_parser.exit(2, f"bench_serving.py: error: {error}\n")
    except KeyboardInterrupt:
        options_parser.exit(130)
    print(describe(summary))
    write(options, summary, outcome)
    return int(summary.num_failed > 0)


def _refuse(options: argparse.Namespace) -> None:
    """Raises BenchError for options that do not go together."""
    if options.endpoint == "chat" and options.dataset == "random-ids":
        raise BenchError("chat takes no token ids: use --dataset random")
    if (options.dataset == "sharegpt-file") != (options.dataset_path is not None):
        raise BenchError("--dataset sharegpt-file and --dataset-path go together")


def run_self_test() -> int:
    """Returns the exit status."""
    well = True
    for endpoint in get_args(Endpoint):
        findings, _ = self_test(endpoint)
        print(describe_self_test(endpoint, findings), flush=True)
        well = well and not findings.problems and findings.within >= _LEAST_WITHIN
    print("self-test: passed" if well else "self-test: FAILED (times alone: is the machine busy?)")
    return 0 if well else 1


def bench(options: argparse.Namespace, goals: dict[str, float]) -> tuple[Summary, Outcome]:
    """Warm up, send the load, sum it up; `options.model` is then the model's name. Raises BenchError if it cannot."""
    workload = Workload(
        dataset=options.dataset,
        num_prompts=options.num_prompts,
        input_lens=options.input_len,
        output_lens=options.output_len,
        shared_prefix_len=options.shared_prefix_len,
        path=options.dataset_path,
        rate=options.request_rate,
        seed=options.seed,
        ids=options.endpoint != "chat",
    )
    asks = make_asks(workload)
    base_url = options.base_url.rstrip("/").removesuffix("/v1")
    key = options.api_key or os.environ.get(KEY_VARIABLE)
    options.model = model = options.model or served_model(base_url, key)
    job = Job(
        target=Target(base_url, model, options.endpoint, key),
        asks=asks,
        concurrency=options.concurrency or len(asks),
        run_id=f"bench-{secrets.token_hex(4)}",
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        timeout_s=options.timeout,
    )
    if options.warmup > 0:
        warm_up(job, workload._replace(num_prompts=options.warmup, rate=float("inf")))
    limit = f"at most {job.concurrency} at a time" if options.concurrency else "no limit"
    print(
        f"{model} at {base_url}{ROUTES[options.endpoint]}: {len(asks)} x {options.dataset},"
        f" {options.request_rate:g} requests/s offered, {limit}",
        flush=True,
    )
    shown = sys.stderr.isatty() and not options.quiet
    with tqdm(total=len(asks), unit="req", disable=not shown, leave=False) as bar:
        outcome = run_load(job, options.processes, bar.update)
    return summarise(outcome, [request.output_len for request in asks], goals), outcome


def warm_up(job: Job, workload: Workload) -> None:
    """Send requests that are not measured. Raises BenchError if one fails: the load would do no better."""
    asks = make_asks(workload, warmup=True)
    warm = msgspec.structs.replace(
        job, asks=asks, concurrency=min(job.concurrency, len(asks)), run_id=f"{job.run_id}-warm-up"
    )
    failed = [record for record in run_load(warm, 1).records if record.error]
    if failed:
        raise BenchError(f"a warm-up request failed: {failed[0].error}: {failed[0].message}")


def served_model(base_url: str, api_key: str | None) -> str:
    """The first model that the server lists. Raises BenchError if it lists none."""
    request = urllib.request.Request(f"{base_url}/v1/models")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        # As the requests do, past any proxy.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_LOOKUP_S) as response:
            return json.load(response)["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(
            f"{base_url}/v1/models names no model ({error}); is the server up? else say --model"
        ) from error


def write(options: argparse.Namespace, summary: Summary, outcome: Outcome) -> None:
    """The files that were asked for."""
    if options.json:
        begin = min(record.sent for record in outcome.records)
        told = {name: _plain(value) for name, value in vars(options).items() if name not in ("api_key", "self_test")}
        found = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "options": told,
            "summary": summary,
            "requests": [row(record, begin) for record in outcome.records],
        }
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    if options.plot:
        title = (
            f"{options.endpoint}, {options.num_prompts} x {options.dataset}:"
            f" {summary.output_tokens_per_s:,.0f} output tok/s"
        )
        options.plot.write_text(timeline(outcome.records, title))


def _plain(value: object) -> object:
    if isinstance(value, Path) or value == float("inf"):
        return str(value)
    return f"{value.low}:{value.high}" if isinstance(value, Lengths) else value
