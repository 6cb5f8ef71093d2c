"""Our server and its peers on the same CPU, the same weights, over HTTP: output tok/s, TTFT and prefill, and ratios.

    export PYTHONPATH=.
    python tools/bench_cpu.py --llama-server PATH --vllm PATH --model default q4_0 --json out.json
    python tools/bench_cpu.py --llama-server PATH --sweep llama --sweep-only        # its best settings, kept for later
    python tools/bench_cpu.py --servers engine --engine-variant one='--cpu-threads 1' --engine-variant two=''

The servers run in turn, ours and the peers', and all of that --rounds times, each in a process of its own. Requests are
streamed in closed loops, of a fixed length, with prompts that are all different and the same for every server; tokens
are those of the servers' own `usage`. Progress goes to standard error. A server that fails costs its own rows only.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.errors import ModelFileError
from engine.model_files.default_model import cache_dir, fetch_default_model
from tools.cpu_bench.convert import find_llama_quantize, make_hf, make_q4_0
from tools.cpu_bench.measure import BUSY_CORES, Failure, Outcome, Workload, measure, say
from tools.cpu_bench.prompts import Prompts, one_token_words
from tools.cpu_bench.report import Summary, summarise, tables, troubles
from tools.cpu_bench.servers import (
    NUM_CORES,
    PEERS,
    Contender,
    Engine,
    Extra,
    Llama,
    LlamaSettings,
    Model,
    Stage,
    Vllm,
    find_llama_server,
    find_vllm,
)
from tools.cpu_bench.sweep import Tried, shown, sweep_llama

SERVERS = ("engine", *PEERS)


class Report(msgspec.Struct, frozen=True):
    """The JSON file."""

    machine: dict[str, str | int]
    options: dict[str, str]
    summary: Summary
    outcomes: list[Outcome]
    failures: list[Failure]
    skipped: list[str]
    sweep: list[Tried]


def main() -> int:
    args = parse()
    # As an exception, so that the server that runs is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.make_hf or args.make_q4_0:
        return convert(args)
    models = [find_model(name, args) for name in args.model]
    stages = [Stage(level, args.prompt_tokens, args.output_tokens) for level in args.concurrency]
    counts = [args.requests_per_level or max(4, level * 3) for level in args.concurrency]
    if args.prefill_tokens:
        stages.insert(0, Stage(1, args.prefill_tokens, 1, prefill=True))
        counts.insert(0, args.prefill_requests)
    watched = min(args.concurrency, key=lambda level: abs(level - 8))
    prompts = Prompts(one_token_words(models[0].gguf))
    workload = Workload(tuple(stages), tuple(counts), prompts, args.chat, str(watched), args.idle, args.stage_timeout)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    settings: dict[str, LlamaSettings] = {}
    tried: list[Tried] = []
    skipped: list[str] = []
    if args.sweep:
        llama_server = find_llama_server(args.llama_server)
        if llama_server is None:
            sys.exit("bench_cpu: --sweep llama needs --llama-server PATH")
        settings, tried = sweep(models, llama_server, args, workload)
        if args.sweep_only:
            return 0
    elif args.llama_settings.is_file():
        settings = msgspec.json.decode(args.llama_settings.read_bytes(), type=dict[str, LlamaSettings])
        say(f"llama-server's settings are those of the sweep in {args.llama_settings}")
    contenders = [one for model in models for one in contenders_of(model, models, args, settings, skipped)]
    for reason in skipped:
        say(f"skipped: {reason}")
    outcomes, failures = run(contenders, workload, args)
    summary = summarise(outcomes, rivals(contenders))
    print(tables(summary, [stage.key for stage in stages], workload.cpu_stage))
    print("\n" + "\n".join(troubles(outcomes, failures, skipped)))
    if args.json:
        options = {name: str(value) for name, value in vars(args).items()}
        report = Report(machine(), options, summary, outcomes, failures, skipped, tried)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0 if outcomes else 1


def run(
    contenders: Sequence[Contender], workload: Workload, args: argparse.Namespace
) -> tuple[list[Outcome], list[Failure]]:
    """All rounds. What was measured before an interrupt is kept."""
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    # Not tried again.
    lost: set[str] = set()
    try:
        for turn in range(args.rounds):
            for contender in contenders:
                if contender.name in lost or (contender.kind == "vllm" and turn >= args.vllm_rounds):
                    continue
                say(f"round {turn + 1} of {args.rounds}: {contender.name}")
                before = len(outcomes)
                for found in measure(contender, workload, turn, args.work_dir, idle=turn == 0):
                    if isinstance(found, Outcome):
                        outcomes.append(found)
                    else:
                        failures.append(found)
                if len(outcomes) == before:
                    lost.add(contender.name)
    except KeyboardInterrupt:
        say("interrupted: the tables hold what was measured so far")
    return outcomes, failures


def contenders_of(
    model: Model,
    models: Sequence[Model],
    args: argparse.Namespace,
    settings: dict[str, LlamaSettings],
    skipped: list[str],
) -> list[Contender]:
    """Ours, then the peers, over one model; vLLM only over the first, whose weights it has as float32."""
    found: list[Contender] = []
    if "engine" in args.servers:
        for name, extra in variants("engine", args.engine_variant, args.engine_args):
            found.append(Engine(name, model, args.engine, extra))
    if "llama" in args.servers:
        server = find_llama_server(args.llama_server)
        if server is None:
            skipped.append("llama: no llama-server (--llama-server PATH)")
        else:
            extra = Extra.parse(args.llama_args)
            found.append(Llama("llama", model, server, extra, settings.get(model.label)))
    if "vllm" in args.servers and model is models[0]:
        command = find_vllm(args.vllm)
        if command is None:
            skipped.append("vllm: no vllm command (--vllm PATH)")
        else:
            try:
                whole = msgspec.structs.replace(model, hf=hf_folder(model, args))
                for name, extra in variants("vllm fp32", args.vllm_variant, args.vllm_args):
                    found.append(Vllm(name, whole, command, extra))
            except ModelFileError as error:
                skipped.append(f"vllm: {error}")
    return found


def variants(name: str, given: Sequence[str], common: str) -> list[tuple[str, Extra]]:
    """NAME=ARGS words as `name NAME` and what is added to the common arguments; just `name` where none is given."""
    parts = [text.partition("=") for text in given] or [("", "", "")]
    return [(f"{name} {own}".strip(), Extra.parse(common).plus(Extra.parse(text))) for own, _, text in parts]


def rivals(contenders: Sequence[Contender]) -> list[tuple[str, str]]:
    """Every one of ours with every peer that has the same weights."""
    return [
        (ours.name, peer.name)
        for ours in contenders
        for peer in contenders
        if ours.ours and not peer.ours and ours.model.label == peer.model.label
    ]


def sweep(
    models: Sequence[Model], server: Path, args: argparse.Namespace, workload: Workload
) -> tuple[dict[str, LlamaSettings], list[Tried]]:
    """Sweep llama-server over every model, print and keep what was best."""
    short = [stage if stage.prefill else msgspec.structs.replace(stage, output_tokens=args.sweep_tokens)
             for stage in workload.stages]  # fmt: skip
    counts = [2 if stage.prefill else max(2, stage.concurrency) for stage in short]
    smaller = Workload(tuple(short), tuple(counts), workload.prompts, workload.chat, stage_timeout_s=args.stage_timeout)
    best: dict[str, LlamaSettings] = {}
    tried: list[Tried] = []
    for model in models:
        llama = Llama("sweep", model, server, Extra((), Extra.parse(args.llama_args).env))
        best[model.label], more = sweep_llama(llama, smaller, args.work_dir)
        tried += more
    for row in tried:
        busy = f"  (others used {row.others_cores:.2f} cores)" if row.others_cores > BUSY_CORES else ""
        print(f"{row.model:>8} {row.stage:>8} {row.rate:>9.1f} tok/s  {shown(row.choices)}{busy}")
    for label, stages in best.items():
        for key, choices in stages.items():
            print(f"best {label} {key}: {shown(dict(choices))}")
    args.llama_settings.parent.mkdir(parents=True, exist_ok=True)
    args.llama_settings.write_bytes(msgspec.json.format(msgspec.json.encode(best)) + b"\n")
    return best, tried


def find_model(name: str, args: argparse.Namespace) -> Model:
    """`default`, `q4_0` (the default re-quantised, made on first use) or a .gguf file."""
    if name == "default":
        return Model("q4_1", fetch_default_model())
    if name == "q4_0":
        target = args.work_dir / "default.Q4_0.gguf"
        if not target.is_file():
            say(f"re-quantising the default model as {target}")
            make_q4_0(fetch_default_model(), target, find_llama_quantize(find_llama_server(args.llama_server)))
        return Model("q4_0", target)
    path = Path(name)
    if not path.is_file():
        raise ModelFileError(f"model {name}: neither default, q4_0 nor a .gguf file")
    return Model(path.stem, path)


def hf_folder(model: Model, args: argparse.Namespace) -> Path:
    """The model as an HF directory, made on first use."""
    folder = args.hf or args.work_dir / f"hf-{model.label}"
    if not (folder / "config.json").is_file():
        say(f"writing the weights as float32 into {folder}")
        make_hf(model.gguf, folder)
    return folder


def convert(args: argparse.Namespace) -> int:
    """The modes that only write a model."""
    source = find_model(args.model[0], args).gguf
    if args.make_hf:
        make_hf(source, args.make_hf)
    if args.make_q4_0:
        make_q4_0(source, args.make_q4_0, find_llama_quantize(find_llama_server(args.llama_server)))
    return 0


def machine() -> dict[str, str | int]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    flags = sorted(flag for flag in about.get("flags", "").split() if flag.startswith(("avx", "amx", "fma")))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "processor": about.get("model name", platform.machine()),
        "flags": " ".join(flags),
        "cores": NUM_CORES,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is compared")
    what.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="absent peers are skipped")
    what.add_argument("--model", nargs="+", default=["default"], help="default, q4_0 (made from it) or .gguf files")
    what.add_argument("--engine", type=Path, default=Path(".venv/bin/engine-serve"), help="our command")
    what.add_argument("--engine-args", default="", help="for all of ours; leading NAME=value words are environment")
    what.add_argument(
        "--engine-variant", action="append", default=[], metavar="NAME='ARGS'", help="one of several of ours"
    )
    what.add_argument("--llama-server", type=Path, help="llama-server or llama-cpp-server (default: on PATH)")
    what.add_argument("--llama-args", default="", help="instead of the swept or default settings")
    what.add_argument("--vllm", type=Path, help="the vllm command (default: on PATH)")
    what.add_argument("--vllm-args", default="", help="added to vLLM's; leading NAME=value words are environment")
    what.add_argument(
        "--vllm-variant", action="append", default=[], metavar="NAME='ARGS'", help="one of several of vLLM's"
    )
    what.add_argument("--vllm-rounds", type=int, default=1, help="rounds with vLLM, whose start takes minutes")
    work = parser.add_argument_group("what is asked")
    work.add_argument("--rounds", type=int, default=2)
    work.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    work.add_argument("--requests-per-level", type=int, default=0, help="default: 3 times the concurrency, at least 4")
    work.add_argument("--prompt-tokens", type=int, default=64)
    work.add_argument("--output-tokens", type=int, default=96)
    work.add_argument("--prefill-tokens", type=int, default=1024, help="of the long prompts; 0 for none")
    work.add_argument("--prefill-requests", type=int, default=4)
    work.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    work.add_argument("--stage-timeout", type=float, default=300.0, help="seconds after which a level is given up")
    work.add_argument("--idle", type=float, default=10.0, help="seconds to watch our idle server; 0 for not")
    sweeps = parser.add_argument_group("a peer's best settings")
    sweeps.add_argument("--sweep", choices=["llama"], help="try its settings in short runs first and use the best")
    sweeps.add_argument("--sweep-only", action="store_true", help="then end")
    sweeps.add_argument("--sweep-tokens", type=int, default=48, help="output tokens of a request in a sweep")
    sweeps.add_argument("--llama-settings", type=Path, help="file of a sweep's best (default: in --work-dir)")
    files = parser.add_argument_group("files")
    files.add_argument("--json", type=Path, help="file to write everything to")
    files.add_argument("--work-dir", type=Path, default=cache_dir() / "bench-cpu", help="converted models and logs")
    files.add_argument("--hf", type=Path, help="the model as an HF directory (default: made in --work-dir)")
    files.add_argument("--make-hf", type=Path, metavar="DIR", help="only write the model as a float32 HF directory")
    files.add_argument("--make-q4_0", type=Path, metavar="FILE", help="only write the model re-quantised as Q4_0")
    args = parser.parse_args()
    if min(args.concurrency) < 1 or args.rounds < 1 or min(args.prompt_tokens, args.output_tokens) < 1:
        parser.error("--concurrency, --rounds, --prompt-tokens and --output-tokens must be above 0")
    if any("=" not in variant for variant in args.engine_variant + args.vllm_variant):
        parser.error("--engine-variant and --vllm-variant are NAME='ARGS'")
    args.llama_settings = args.llama_settings or args.work_dir / "llama-settings.json"
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModelFileError as error:
        sys.exit(f"bench_cpu: {error}")
