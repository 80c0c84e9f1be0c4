#!/usr/bin/env python3
"""The experiments of docs/elastic.md: each makes bench/results/simulate-NAME.json.

    bench/simulate.py [EXPERIMENT ..] [--forebay PROGRAM] [--seeds N]

Without a name all but `speed` run, one after the other, in a few minutes. Every cell is a call of
`forebay simulate`, which is printed first and can be repeated by itself. Recorded traces are looked for in
$FOREBAY_TRACES, and `traces` is left out without them. Knows which cells there are, and what was measured
on GPUs.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
RESULTS = BENCH / "results"
PROFILES = BENCH.parent / "crates" / "steps" / "profiles"
COMBINED = "lpwl,lmetric,linear,session-sticky,added-latency"
TRANSFERS = "elastic,elastic-pulls,elastic-hand-overs,threshold,migrate-5,migrate-10"
# Host memory of the engines with long contexts: 1.5 million tokens of 98,304 bytes.
LONG = "--preset long-context --profile h20-qwen3-coder-30b-a3b --tier 140GiB"
WARM = f"--marginals {BENCH / 'vllm_load.toml'} --sessions 900 --profile h200-llama-3.1-8b --tier 60GiB"

Row = dict[str, Any]


class Skipped(Exception):
    """What an experiment needs is not there."""


class Simulator:
    """The program, and the rows that it has said so far."""

    def __init__(self, program: str, seeds: int) -> None:
        self.program, self.seeds = program, seeds
        self.said: dict[str, Any] = {}
        self.rows: list[Row] = []

    def run(self, name: str, arguments: str, runs: str | None = None) -> dict[str, Row]:
        """One cell. Returns its rows by what stands behind the cell's name."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            runs = f"--seeds {self.seeds}" if runs is None else runs
            command = f"{self.program} simulate {arguments} --name {name} {runs}"
            print(f"$ {command}", flush=True)
            subprocess.run([*command.split(), "--json", str(file)], check=True)
            said = json.loads(file.read_text())
        self.rows += said["rows"]
        self.said = self.said or {key: said[key] for key in ("commit", "date", "machine")}
        return {row["name"].removeprefix(f"sim.{name}."): row for row in said["rows"]}

    def add(self, name: str, unit: str, values: list[float]) -> None:
        """A row that was computed from others."""
        line = {"name": name, "unit": unit, "value": statistics.median(values)}
        self.rows.append(line | {"min": min(values), "max": max(values), "runs": len(values)})

    def copy(self, name: str, row: Row) -> None:
        """A row under another name."""
        self.rows.append(row | {"name": name})


def predict(simulator: Simulator) -> None:
    """The loaded run of bench/vllm_load.py, which nothing was fitted to."""
    measured: dict[str, list[float]] = {}
    for file in ("vllm-load-h200-pair.json", "vllm-load-h200-pair-simple.json"):
        for row in json.loads((RESULTS / file).read_text())["rows"]:
            if "peer" in row:
                measured.setdefault(row["name"].removeprefix("vllm.load."), []).append(row["value"])
    load = f"--marginals {BENCH / 'vllm_load.toml'} --profile h200-llama-3.1-8b --tier 60GiB --fill"
    arguments = f"{load} --engines 1 --at-once 32 --policies session-sticky"
    found = simulator.run("predict.run", arguments, "--seeds 1")
    simulator.run("predict.budget2048", f"{arguments} --max-num-batched-tokens 2048", "--seeds 1")
    for figure, values in measured.items():
        row = found.get(f"session-sticky.{figure}")
        if row:
            errors = [row["value"] / value - 1 for value in values]
            short_name = figure if figure == "tokens_per_s" else figure.removesuffix("_s")
            simulator.add(f"sim.predict.{short_name}", "fraction", errors)


def ratios(simulator: Simulator, cell: str, found: dict[str, Row], policy: str, other: str) -> None:
    """The rows of a cell that say what part a policy has of what another one has."""
    for figure in ("tpot_p90", "ttft_p90", "tokens_per_s"):
        long_name = figure if figure.endswith("_s") else f"{figure}_s"
        simulator.copy(f"sim.{cell}.{figure}", found[f"{policy}.{long_name}.of_{other}"])


def elastic(simulator: Simulator) -> None:
    """E4: agents with long contexts on eight H20s."""
    for sessions in (8, 12, 16):
        name = f"elastic.{sessions}pergpu"
        policies = f"--policies {COMBINED},{TRANSFERS} --against lpwl,added-latency"
        found = simulator.run(name, f"{LONG} --at-once {8 * sessions} {policies}")
        ratios(simulator, name, found, "elastic", "added-latency")


def warm(simulator: Simulator) -> None:
    """E4: warm-heavy agents on eight H200s."""
    for sessions in (16, 24, 32):
        name = f"social.{sessions}pergpu"
        policies = f"--policies {COMBINED},elastic --against lpwl,added-latency"
        found = simulator.run(name, f"{WARM} --at-once {8 * sessions} {policies}")
        ratios(simulator, name, found, "added-latency", "lpwl")


def scaled(prefill: float, decode: float) -> str:
    """A file with the profile of the H20, wrong by these factors."""
    profile = (PROFILES / "h20-qwen3-coder-30b-a3b.toml").read_text()
    factors = {
        "linear_us_per_token": prefill,
        "attention_ns_per_pair": prefill,
        "kv_read_ns_per_context_token": decode,
        "us_per_request": decode,
        "floor_graph_us": decode,
    }

    def multiplied(line: re.Match[str]) -> str:
        return f"{line[1]} = {float(line[2]) * factors.pop(line[1], 1.0)}"

    # The first `us_per_request` is that of a step.
    text = re.sub(
        r"^(\w+) = ([0-9._]+)$", lambda it: multiplied(it) if it[1] in factors else it[0], profile, flags=re.M
    )
    file = Path(tempfile.gettempdir()) / f"h20-prefill{prefill}-decode{decode}.toml"
    file.write_text(text)
    return str(file)


def stale(simulator: Simulator) -> None:
    """E8: what a late or wrong view does."""
    cell = f"{LONG} --at-once 64 --policies lpwl,added-latency,elastic --against lpwl"
    for delay in (0.5, 1, 2, 5):
        simulator.run(f"stale.delay{str(delay).replace('.', '_')}", f"{cell} --view-delay {delay}")
    for error in (0.25, 0.5):
        simulator.run(f"stale.hits{int(100 * error)}", f"{cell} --hit-error {error}")
    simulator.run("stale.profile", f"{cell} --router-profile h200-llama-3.1-8b")
    simulator.run("stale.prefill30", f"{cell} --router-profile {scaled(1.3, 0.7)}")
    simulator.run("stale.decode30", f"{cell} --router-profile {scaled(0.7, 1.3)}")
    simulator.run("stale.true_hits", f"{cell} --true-hits")


def sessions64(simulator: Simulator) -> None:
    """The demo's traces with 64 sessions, on the virtual clock: a busy machine changes nothing."""
    # A million tokens of host memory in all, as the demo has.
    demo = "--preset demo --sessions 64 --engines 4 --at-once 64 --pool-tokens 120000 --tier 23437MiB"
    policies = f"--policies round-robin,least-loaded,{COMBINED} --against lpwl"
    simulator.run("sessions64", f"{demo} --shared-tier --ramp 20 --warm-up 0 {policies}", "--seeds 20")


def limits(simulator: Simulator) -> None:
    """What would change the answer: no host tier, a shared one, slow networks, few sessions."""
    cell = "--policies lpwl,added-latency,elastic --against added-latency"
    simulator.run("limits.no_tier", f"{LONG.replace('140GiB', '0')} --at-once 64 {cell}")
    simulator.run("limits.shared_tier", f"{LONG} --shared-tier --at-once 64 {cell}")
    simulator.run("limits.2pergpu", f"{LONG} --at-once 16 {cell}")
    for rate in (5, 1.2):
        simulator.run(
            f"limits.network{str(rate).replace('.', '_')}", f"{LONG} --network {rate} --at-once 64 {cell}"
        )
    heavy = "--preset heavy-prefill --profile h20-qwen3-coder-30b-a3b --tier 140GiB"
    simulator.run("limits.heavy", f"{heavy} --at-once 64 {cell}")
    simulator.run("limits.12pergpu_shared_tier", f"{LONG} --shared-tier --at-once 96 {cell}")
    report = f"{heavy} --at-once 8 --answers 200 --warm-up 0 --policies lpwl,added-latency,threshold,elastic"
    simulator.run("limits.report", f"{report} --against lpwl")
    crowd = WARM.replace("60GiB", "600GiB")
    simulator.run("limits.warm32_large_tier", f"{crowd} --at-once 256 {cell}")


def traces(simulator: Simulator) -> None:
    """Recorded traffic, of which there is one trace each: those in $FOREBAY_TRACES."""
    folder = Path(os.environ.get("FOREBAY_TRACES", "traces"))
    weka = folder / "weka-claude-code"
    mooncake = {
        name: folder / "mooncake-fast25" / f"{name}_trace.jsonl" for name in ("conversation", "synthetic")
    }
    for trace in (weka, *mooncake.values()):
        if not trace.exists():
            raise Skipped(f"{trace} is not there: say with FOREBAY_TRACES where the traces are")
    policies = "--policies lpwl,session-sticky,added-latency,elastic --against lpwl,added-latency"
    h20 = f"--profile h20-qwen3-coder-30b-a3b --tier 140GiB --engines 4 --at-once 24 {policies}"
    h200 = f"--profile h200-llama-3.1-8b --tier 60GiB --engines 8 --open {policies}"
    simulator.run("traces.weka", f"{weka} {h20}", "")
    for name, trace in mooncake.items():
        simulator.run(f"traces.mooncake_{name}", f"{trace} {h200}", "")


def speed(simulator: Simulator) -> None:
    """How long 2.1 million requests take the simulator, and how much memory."""
    marginals = (BENCH / "vllm_load.toml").read_text()
    # Sessions that all begin at once would all be in memory at once while they are generated.
    marginals = marginals.replace("starts_over_s = 0.0", "starts_over_s = 1000000.0")
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(marginals.replace("block_tokens = 64", "block_tokens = 256"))
        file.flush()
        load = f"--marginals {file.name} --sessions 228000 --profile h200-llama-3.1-8b --tier 60GiB"
        for engines in (8, 1000):
            arguments = f"{load} --engines {engines} --at-once {32 * engines} --policies added-latency"
            begun = time.monotonic()
            simulator.run(f"speed.{engines}engines", arguments, "--seeds 1")
            simulator.add(f"sim.speed.{engines}engines.wall_s", "s", [time.monotonic() - begun])
            memory_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
            simulator.add(f"sim.speed.{engines}engines.memory_gib", "GiB", [memory_gib])


EXPERIMENTS: dict[str, Callable[[Simulator], None]] = {
    "predict": predict,
    "elastic": elastic,
    "warm": warm,
    "stale": stale,
    "sessions64": sessions64,
    "limits": limits,
    "traces": traces,
    "speed": speed,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", nargs="*", help=", ".join(EXPERIMENTS))
    parser.add_argument("--forebay", default="forebay", help="the forebay program")
    parser.add_argument("--seeds", type=int, default=5, help="traces of each cell")
    args = parser.parse_args()
    unknown = set(args.experiment) - EXPERIMENTS.keys()
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no such experiment; there are {', '.join(EXPERIMENTS)}")
    for name in args.experiment or [name for name in EXPERIMENTS if name != "speed"]:
        simulator = Simulator(args.forebay, args.seeds)
        try:
            EXPERIMENTS[name](simulator)
        except Skipped as reason:
            print(f"{name}: left out, {reason}")
            continue
        made = {"bench": "simulate", **simulator.said, "rows": simulator.rows}
        file = RESULTS / f"simulate-{name}.json"
        file.write_text(json.dumps(made, indent=2) + "\n")
        print(f"{len(simulator.rows)} rows in {file}")


if __name__ == "__main__":
    main()
