#!/usr/bin/env python3
"""What `--policy elastic` costs while it hands nothing over: room for KV, and time for each token.

    bench/elastic_idle.py --plain http://127.0.0.1:8000 --ours http://127.0.0.1:8001 --profile mine.toml \
        --json elastic-idle.json

Two vLLMs that are alike, one of them with our connector and a node. Before that one stands `forebay route`
with the policy `elastic`, which has nobody to hand over to. Some requests decode at the one, then at the
other, in turn. Nobody else uses them. Knows vLLM's completions API and its metrics.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import vllm_engine
from interference import Engine

DECODES = 16
CONTEXT = 2000
TOKENS = 400
RUNS = 7
POOL = re.compile(r'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', re.MULTILINE)
MIB = 1 << 20


def blocks(url: str) -> int:
    """Of the engine's pool."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        found = POOL.search(answer.read().decode())
    if not found:
        sys.exit(f"{url}/metrics: no num_gpu_blocks in vllm:cache_config_info")
    return int(found.group(1))


@contextlib.contextmanager
def router(program: str, engine: str, profile: Path) -> Iterator[str]:
    """A router with the policy before that engine, and its address."""
    url = f"http://127.0.0.1:{vllm_engine.free_port()}"
    command = [program, "route", "--listen", url.removeprefix("http://"), "--policy", "elastic"]
    command += ["--hand-over", "forebay", "--profile", str(profile), "--backend", f"e0={engine}"]
    process = subprocess.Popen(command)
    try:
        time.sleep(1.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def tpot_ms(engine: Engine) -> float:
    """The middle of the requests' times for a token after the first, all of them decoding together."""
    found: list[float] = []

    def decode() -> None:
        times = list(engine.ask(engine.draw(CONTEXT), TOKENS))
        found.append((times[-1] - times[0]) / (len(times) - 1) * 1e3)

    threads = [threading.Thread(target=decode) for _ in range(DECODES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < DECODES:
        sys.exit(f"{DECODES - len(found)} of {DECODES} requests failed")
    return statistics.median(found)


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", required=True, help="a vLLM without a connector")
    parser.add_argument("--ours", required=True, help="one with ours")
    parser.add_argument("--profile", type=Path, required=True, help="what `forebay calibrate` wrote of one")
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="token ids are drawn below it")
    parser.add_argument("--block-kib", type=float, default=2048, help="of a block in all layers")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each, in turn")
    parser.add_argument("--forebay", help="the program")
    parser.add_argument("--gpu", action="append", default=[], help="its name, for the results")
    args = parser.parse_args()
    with router(vllm_engine.program(args.forebay), args.ours, args.profile) as url:
        engines = {name: Engine(at, args.vocabulary) for name, at in (("plain", args.plain), ("ours", url))}
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for run in range(args.runs + 1):
            for name, engine in engines.items():
                value = tpot_ms(engine)
                if run > 0:  # The first one warms up.
                    taken[name].append(value)
    pools = {name: blocks(at) for name, at in (("plain", args.plain), ("ours", args.ours))}
    lost_mib = (pools["plain"] - pools["ours"]) * args.block_kib * 1024 / MIB
    ratios = [ours / plain for ours, plain in zip(taken["ours"], taken["plain"], strict=True)]
    rows = [
        vllm_engine.row("elastic.idle.hbm_mib", "MiB", [lost_mib], blocks=pools),
        vllm_engine.row("elastic.idle.tpot_ratio", "", ratios),
        *(vllm_engine.row(f"elastic.idle.tpot_ms.{name}", "ms", values) for name, values in taken.items()),
    ]
    for row in rows:
        print(f"{row['name']:32} {row['value']:9.3f} ({row['min']:.3f} to {row['max']:.3f})")
    results = vllm_engine.results("elastic_idle", args.gpu, None, rows)
    args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
