"""The real scheduler on a virtual clock: what each policy does to latency and cache hits under made-up traffic.

    PYTHONPATH=. python tools/sim_scheduler.py --trace chat --rate 20 40 --policy fcfs lpm --json out.json

The device is a model of step times fitted to measurements, so the numbers do not depend on this machine; only the last
two columns do. The same seed gives the same numbers. docs/scheduling.md explains the columns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from engine.config import EngineConfig, SchedulerOptions
from engine.errors import ConfigError
from tools.sim.arrivals import ARRIVALS
from tools.sim.cost import fit, shown
from tools.sim.plots import write_plots
from tools.sim.run import simulate
from tools.sim.summary import Summary, heading, line, summarise
from tools.sim.traces import TRACES, requests

POLICIES = ("fcfs", "lpm", "lof", "dfs-weight", "random", "priority")
MOST_REQUESTS = 1_000_000


def main() -> int:
    args = parse()
    fitted = fit()
    print(shown(fitted), flush=True)
    rows: list[Summary] = []
    print(f"\n{args.trace}, {args.arrivals} arrivals, {args.requests} requests, seed {args.seed}")
    print(heading())
    for rate in args.rate:
        for policy in args.policy:
            run = simulate(
                requests(args.trace, args.arrivals, rate, args.requests, args.seed, args.scale),
                args.requests,
                engine_options(args, policy),
                fitted.cost,
                host_us=args.host_us,
                unknown_lengths=args.unknown_lengths,
            )
            row = summarise(
                run,
                trace=args.trace,
                arrivals=args.arrivals,
                rate=rate,
                policy=policy,
                slo_ttft_ms=args.slo_ttft,
                slo_itl_ms=args.slo_itl,
            )
            rows.append(row)
            print(line(row), flush=True)
    if args.json:
        report = {"options": {name: value for name, value in vars(args).items() if name not in ("json", "plots")}}
        report["device"] = fitted
        report["rows"] = rows
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if args.plots:
        for path in write_plots(args.plots, f"{args.trace}-{args.arrivals}", rows):
            print(f"wrote {path}")
    return 0


def engine_options(args: argparse.Namespace, policy: str) -> SchedulerOptions:
    """The engine's own options; raises ConfigError on a value that it would refuse."""
    values = {
        "device": "null",
        "schedule_policy": policy,
        "max_running_requests": args.max_running_requests,
        "chunked_prefill_size": args.chunked_prefill_size,
        "max_prefill_tokens": args.max_prefill_tokens,
        "max_step_gap": args.max_step_gap,
        "max_total_tokens": args.max_total_tokens,
        "page_size": args.page_size,
        "schedule_conservativeness": args.schedule_conservativeness,
        "disable_radix_cache": args.disable_radix_cache,
        "radix_eviction_policy": args.radix_eviction_policy,
        "overlap_depth": args.overlap_depth,
        "random_seed": args.seed,
    }
    try:
        return msgspec.convert(values, SchedulerOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--trace", choices=tuple(TRACES), default="chat")
    traffic.add_argument("--arrivals", choices=ARRIVALS, default="poisson")
    traffic.add_argument("--rate", type=float, nargs="+", default=[20.0], help="requests per second")
    traffic.add_argument("--requests", type=int, default=2000, help=f"up to {MOST_REQUESTS}")
    traffic.add_argument("--seed", type=int, default=1)
    traffic.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths of the trace")
    traffic.add_argument(
        "--unknown-lengths", action="store_true", help="large max_tokens; answers end by a stop token instead"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--slo-ttft", type=float, default=1000.0, help="milliseconds to the first token")
    report.add_argument("--slo-itl", type=float, default=50.0, help="milliseconds per token, mean of a request")
    report.add_argument("--host-us", type=float, default=0.0, help="host microseconds per step; not modelled by itself")
    report.add_argument("--json", type=Path, help="file to write the rows to")
    report.add_argument("--plots", type=Path, help="folder to write SVG files to")
    engine = parser.add_argument_group("engine", "options of engine-serve, by their own names")
    defaults = EngineConfig().scheduler
    engine.add_argument("--policy", choices=POLICIES, nargs="+", default=["fcfs"], help="schedule-policy, several")
    engine.add_argument("--max-running-requests", type=int, default=256)
    engine.add_argument("--chunked-prefill-size", type=int, default=2048)
    engine.add_argument("--max-prefill-tokens", type=int, default=defaults.max_prefill_tokens)
    engine.add_argument("--max-step-gap", type=int, default=defaults.max_step_gap)
    engine.add_argument("--max-total-tokens", type=int, default=400_000)
    engine.add_argument("--page-size", type=int, default=16)
    engine.add_argument("--schedule-conservativeness", type=float, default=defaults.schedule_conservativeness)
    engine.add_argument("--disable-radix-cache", action="store_true")
    engine.add_argument("--radix-eviction-policy", default=defaults.radix_eviction_policy)
    engine.add_argument("--overlap-depth", type=int, default=1)
    args = parser.parse_args()
    if not 1 <= args.requests <= MOST_REQUESTS:
        parser.error(f"--requests must lie in 1..{MOST_REQUESTS}")
    if min(args.rate) <= 0 or args.scale <= 0 or args.host_us < 0:
        parser.error("--rate and --scale must be above 0, --host-us not below")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"sim_scheduler: {error}")
