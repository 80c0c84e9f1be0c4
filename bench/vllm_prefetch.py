#!/usr/bin/env python3
"""What saying `prefetch` ahead gains in vLLM: a prompt comes back whose KV lies on an SSD.

    bench/vllm_prefetch.py FOLDER [--tokens 16384] [--rounds 5] [--lead 2]

In each round the prompt is asked for from memory, from the SSD, and so many seconds after
`forebay kv prefetch`, in an order that changes. HBM's prefix cache is empty each time, and each
time the engine has rested for as long. What is said must be the same each time. Knows what is
asked, and the verbs of `forebay kv`; engines and nodes are started by `vllm_engine`.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_child import process_cpu_s
from vllm_engine import GIB, Node, Site, row
from vllm_ttft import FILL_TRIES, SAID_TOKENS, TAIL_TOKENS, WARM_UP_TOKENS, Engine, links_apart

WAY = "ssd-always"
CASES = ("memory", "ssd", "ahead")
ASKED_RATIO = 1.05
PLACE_LIMIT_S = 60.0
POLL_S = 0.1
TINY_TOKENS, TOKENS = 2048, 16384  # A disk of 1.1 GB/s reads these within 2 s.


@dataclass(frozen=True)
class Load:
    """What a first token took."""

    seconds: float
    cpu_s: float  # Of the engine and the node.


class Bench:
    """An engine, its node, and one prompt whose KV the node has."""

    def __init__(self, site: Site, node: Node, tokens: int, lead_s: float) -> None:
        """Computes the prompt until all of it is kept."""
        self.site, self.node, self.tokens, self.lead_s = site, node, tokens, lead_s
        self.engine = Engine(site, WAY, tokens + TAIL_TOKENS + SAID_TOKENS)
        self.engine.ask(self.engine.prompt(WARM_UP_TOKENS), 2)  # Kernels are compiled by their first use.
        self.prompt = self.engine.prompt(tokens)
        self.file = site.folder / "prompt.json"
        self.file.write_text(json.dumps(self.prompt))
        self.engine.drop()
        self.engine.ask(self.prompt, 1)
        for _ in range(FILL_TRIES):
            self.engine.drop()
            _, cached, self.said = self.engine.ask(self.prompt, 1)
            if cached >= tokens:
                return
            time.sleep(1)
        sys.exit(f"{cached} of {tokens} tokens are kept")

    def verb(self, verb: str) -> str:
        """Says one to the node."""
        command = [self.site.forebay, "kv", verb, "--node", str(self.site.socket), "--json"]
        command += ["--prompt-file", str(self.file)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def places(self) -> list[str]:
        """Where each chunk of the prompt is."""
        return [chunk["place"] for chunk in json.loads(self.verb("list"))["chunks"]]

    def wait(self, place: str, verb: str) -> None:
        """Says a verb until all chunks are there. One that is not written yet cannot be demoted."""
        end = time.monotonic() + PLACE_LIMIT_S
        while set(self.places()) != {place}:
            if time.monotonic() > end:
                sys.exit(f"after {PLACE_LIMIT_S:.0f} s of {verb}, chunks are in {set(self.places())}")
            self.verb(verb)
            time.sleep(POLL_S)

    def ready(self, case: str) -> None:
        """Brings the prompt's KV to where it is to be, and rests."""
        self.engine.drop()
        self.wait("memory" if case == "memory" else "disk", "prefetch" if case == "memory" else "demote")
        begun = time.perf_counter()
        if case == "ahead":
            self.verb("prefetch")
        time.sleep(max(0.0, begun + self.lead_s - time.perf_counter()))

    def load(self, case: str) -> Load:
        """The first token, with KV where the case has it."""
        self.ready(case)
        before_s = self.cpu_s()
        seconds, cached, said = self.engine.ask(self.prompt, 1)
        cpu_s = self.cpu_s() - before_s
        print(f"{case}: {seconds:.4f} s, {cached} tokens loaded", file=sys.stderr, flush=True)
        if cached < self.tokens or said != self.said:
            sys.exit(f"{case}: {cached} of {self.tokens} tokens loaded, {said} said instead of {self.said}")
        return Load(seconds, cpu_s)

    def hit(self) -> Load:
        """The first token with the prompt in HBM."""
        before_s = self.cpu_s()
        seconds = self.engine.ask(self.prompt, 1)[0]
        return Load(seconds, self.cpu_s() - before_s)

    def cpu_s(self) -> float:
        """Processor time of the engine and the node so far."""
        return time.process_time() + process_cpu_s(self.node.process.pid)


Found = dict[str, list[Load]]


def measured(bench: Bench, rounds: int, keep: Callable[[Found], None]) -> None:
    """All cases, in turns."""
    found: Found = {case: [] for case in (*CASES, "hbm")}
    order = random.Random(1)
    for _ in range(rounds):
        for case in order.sample(CASES, len(CASES)):
            found[case].append(bench.load(case))
        found["hbm"].append(bench.hit())
        keep(found)


def rows_of(found: Found, bytes_in_all: int, link_bytes_s: float, lead_s: float) -> list[dict[str, Any]]:
    """A row for each case, and the ratio that is asked for. The disk bounds what can come ahead."""
    ms = {case: [1e3 * load.seconds for load in loads] for case, loads in found.items()}
    middle = {case: statistics.median(runs) for case, runs in ms.items()}
    floor_ms = 1e3 * bytes_in_all / link_bytes_s + middle["hbm"]
    rows = []
    for case, runs in ms.items():
        more: dict[str, Any] = {"raw_ms": runs}
        more["cpu_ms"] = 1e3 * statistics.mean(load.cpu_s for load in found[case])
        if case != "hbm":
            bound_ms = max(floor_ms, middle["ssd"] - 1e3 * lead_s) if case == "ahead" else floor_ms
            more |= {"ceiling": bound_ms, "ratio": middle[case] / bound_ms}
        rows.append(row(f"hints.ttft_ms.{case}", "ms", runs, **more))
    ratios = [ahead / hit for ahead, hit in zip(ms["ahead"], ms["memory"], strict=True)]
    more = {"ceiling": 1.0, "asked": ASKED_RATIO, "of_medians": middle["ahead"] / middle["memory"]}
    return [*rows, row("hints.prefetch_ttft_ratio.vllm", "of a memory hit", ratios, **more)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where prefetch.json goes")
    parser.add_argument("--tokens", type=int, help=f"of the prompt (default {TOKENS})")
    parser.add_argument("--rounds", type=int, default=5, help="of each figure (default 5)")
    parser.add_argument("--lead", type=float, default=2.0, help="seconds (default 2)")
    parser.add_argument("--scratch", type=Path, help="where the log on an SSD lies (default: in FOLDER)")
    parser.add_argument("--forebay", help="the forebay program")
    parser.add_argument("--tiny", action="store_true", help="a model of a few MB on the CPU, to try it")
    args = parser.parse_args()
    folder, tokens = args.folder.absolute(), args.tokens or (TINY_TOKENS if args.tiny else TOKENS)
    scratch = (args.scratch or folder / "scratch").absolute()
    for made in (folder, scratch):
        made.mkdir(parents=True, exist_ok=True)
    memory, disk = (GIB // 4, GIB) if args.tiny else (12 * GIB, 24 * GIB)
    site = Site(scratch, args.tiny, memory, disk, vllm_engine.program(args.forebay))
    vllm_engine.in_environment(site.environment(WAY) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    links = links_apart(folder, args.tiny)

    def keep(found: Found) -> None:
        rows = rows_of(found, tokens * site.bytes_per_token, links["one"], args.lead)
        made = vllm_engine.results("vllm_prefetch", links["gpus"], str(scratch), rows)
        (folder / "prefetch.json").write_text(json.dumps(made, indent=2) + "\n")

    with vllm_engine.node_beside(site, WAY) as node:
        assert node is not None
        measured(Bench(site, node, tokens, args.lead), args.rounds, keep)


if __name__ == "__main__":
    main()
