#!/usr/bin/env python3
"""Routing policies on real engines, one after the other, and what `forebay simulate` says of each.

    bench/elastic.py FOLDER --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001 --profile mine.toml

The engines are vLLMs with our connector and a node each, alike, started with VLLM_SERVER_DEV_MODE=1, and
nobody else uses them. A trace of agents is generated. For each policy the engines' prefix caches are emptied,
a router is started before them, and the trace is replayed, so many sessions at a time, with other tokens than
for the policy before: nothing that nodes still hold is found. The same trace is simulated with the profile.
Both count the same answers, as bench/predict.py does. Knows the router's command line and vLLM's path for
emptying caches.
"""

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import predict
import vllm_engine
from predict import Figures

POLICIES = ("lpwl", "added-latency", "elastic")
# As the simulator names what the router does: it moves KV by hand-over only.
SIMULATED = {"elastic": "elastic-hand-overs"}
MARGINALS = Path(__file__).with_suffix(".toml")
EMPTY_S = 30.0
OTHER_TOKENS = 5_000


def names(engines: list[str]) -> list[str]:
    """Of the engines, as options of `forebay` take them."""
    return [f"e{number}={url}" for number, url in enumerate(engines)]


def ask(url: str, data: bytes | None = None) -> str:
    """What an address answers."""
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=60) as answer:
        return str(answer.read().decode())


def empty(engines: list[str]) -> None:
    """Empties the prefix caches; vLLM says whether it could. It empties no stores: a reset of those gives
    each engine names of its own, under which none takes what another one hands over.
    """
    end = time.monotonic() + EMPTY_S
    for url in engines:
        while not json.loads(ask(f"{url}/reset_prefix_cache", b""))["success"]:
            if time.monotonic() > end:
                sys.exit(f"{url} did not empty its caches in {EMPTY_S:.0f} s")
            time.sleep(0.5)


@contextlib.contextmanager
def router(program: str, policy: str, args: argparse.Namespace, log: Path) -> Iterator[str]:
    """A router with that policy, and its address."""
    port = vllm_engine.free_port()
    command = [program, "route", "--listen", f"127.0.0.1:{port}", "--policy", policy]
    command += ["--profile", str(args.profile), "--decision-log", str(log)]
    for name in names(args.engine):
        command += ["--backend", name]
    if policy == "elastic":
        command += ["--hand-over", args.hand_over, "--network", str(args.network)]
    process = subprocess.Popen(command)
    try:
        time.sleep(1.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def arm(program: str, policy: str, trace: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of a policy's replay. The router's counts at its end stay in the folder."""
    empty(args.engine)
    log, decisions = args.folder / f"{policy}.jsonl", args.folder / f"{policy}-decisions.jsonl"
    for former in (log, decisions):
        former.unlink(missing_ok=True)
    with router(program, policy, args, decisions) as url:
        command = [program, "trace", "replay", str(trace), "--target", url, "--model", args.model]
        # Other token ids for the same blocks.
        vocabulary = args.vocabulary - OTHER_TOKENS * args.policies.index(policy)
        command += ["--vocab", str(vocabulary), "--max-sessions", str(args.at_once)]
        command += ["--log", str(log), "--arm", policy]
        subprocess.run(command, check=True)
        (args.folder / f"{policy}-metrics.txt").write_text(ask(f"{url}/metrics"))
    lines = (json.loads(line) for line in log.read_text().splitlines())
    return [line for line in lines if line["kind"] == "request"]


def decided(log: Path) -> Iterator[dict[str, Any]]:
    """What a policy's decision log says: hand-overs by their end, and how far predictions were off."""
    decisions = [json.loads(line) for line in log.read_text().splitlines()]
    decisions = [one for one in decisions if one["kind"] == "decision" and one["outcome"]]
    name = f"real.elastic.{log.name.removesuffix('-decisions.jsonl')}"
    ends = [one["hand_over"]["handed"]["end"] for one in decisions if one.get("hand_over")]
    for end in sorted(set(ends)):
        yield vllm_engine.row(f"{name}.hand_overs.{end}", "", [ends.count(end)], decisions=len(decisions))
    for is_handed, kind in ((False, "placed"), (True, "handed_over")):
        off = [
            abs(one["outcome"]["first_byte_us"] - one["predicted"]["first_byte_us"]) / 1e6
            for one in decisions
            if bool(one.get("hand_over")) == is_handed and one["outcome"]["first_byte_us"] is not None
        ]
        if off:
            middle = statistics.median(off)
            yield vllm_engine.row(f"{name}.first_token_off_by.{kind}", "s", [middle], decisions=len(off))


def simulated(program: str, trace: Path, args: argparse.Namespace) -> dict[str, Figures]:
    """What the simulator says of each policy."""
    file = args.folder / "simulated.json"
    policies = [SIMULATED.get(policy, policy) for policy in args.policies]
    command = [program, "simulate", str(trace), "--profile", str(args.profile)]
    command += ["--engines", str(len(args.engine)), "--at-once", str(args.at_once), "--tier", args.tier]
    command += ["--network", str(args.network), "--ramp", "0", "--warm-up", str(predict.SKIPPED)]
    command += ["--policies", ",".join(policies), "--name", "run", "--json", str(file)]
    subprocess.run(command, check=True)
    found: dict[str, Figures] = {policy: {} for policy in args.policies}
    for line in json.loads(file.read_text())["rows"]:
        policy, _, figure = line["name"].removeprefix("sim.run.").partition(".")
        name = figure if figure == "tokens_per_s" else figure.removesuffix("_s")
        found[args.policies[policies.index(policy)]][name] = line["value"]
    return found


def rows(real: dict[str, tuple[Figures, int]], said: dict[str, Figures]) -> Iterator[dict[str, Any]]:
    """Each figure of each policy, the simulated one beside it, and its part of the first policy's."""
    first = next(iter(real))
    for policy, (figures, answers) in real.items():
        for name, value in figures.items():
            unit = {"tokens_per_s": "1/s", "cached": "fraction"}.get(name, "s")
            line = vllm_engine.row(f"real.elastic.{policy}.{name}", unit, [value], answers=answers)
            line |= {"simulated": said[policy][name], "error": said[policy][name] / value - 1}
            line[f"of_{first}"] = value / real[first][0][name]
            line[f"simulated_of_{first}"] = said[policy][name] / said[first][name]
            yield line


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where logs and elastic.json go")
    parser.add_argument("--engine", action="append", required=True, metavar="URL", help="one for each engine")
    parser.add_argument("--profile", type=Path, required=True, help="what `forebay calibrate` wrote of one")
    parser.add_argument("--model", required=True, help="as the engines name it")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=list(POLICIES))
    parser.add_argument("--marginals", type=Path, default=MARGINALS, help="of the load")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tier", default="48GiB", help="host memory for KV of each engine's node")
    parser.add_argument("--network", type=float, default=100.0, help="GB/s between the engines")
    parser.add_argument("--hand-over", default="forebay", help="the connector: forebay or nixl")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="token ids are drawn below it")
    parser.add_argument("--forebay", help="the program")
    parser.add_argument("--gpu", action="append", default=[], help="its name, for the results")
    args = parser.parse_args()
    program = vllm_engine.program(args.forebay)
    args.folder.mkdir(parents=True, exist_ok=True)
    trace = args.folder / "trace.jsonl"
    command = [program, "trace", "generate", "--marginals", str(args.marginals), "--out", str(trace)]
    command += ["--sessions", str(args.sessions), "--seed", str(args.seed)]
    subprocess.run(command, check=True)
    real = {policy: predict.measured(arm(program, policy, trace, args)) for policy in args.policies}
    made = list(rows(real, simulated(program, trace, args)))
    for line in made:
        both = f"measured {line['value']:9.4f}, simulated {line['simulated']:9.4f}"
        print(f"{line['name']:44} {both}: {line['error']:+.1%}")
    for policy in args.policies:
        made += decided(args.folder / f"{policy}-decisions.jsonl")
    results = vllm_engine.results("elastic", args.gpu, None, made)
    (args.folder / "elastic.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
