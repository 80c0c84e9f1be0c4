#!/usr/bin/env python3
"""Forebay beside other systems that keep KV in host memory, in one run on one GPU.

    bench/peers_gpu.py FOLDER [--ways memory pegaflow lmcache offloading simple] [--rounds 5]

8 prompts of 10,000 tokens come at 4 a second and ask for one token each: first cold, then in each
round warm, with HBM's prefix cache empty. The engines of all ways are alive at the same time, each
with its share of the GPU, and take turns: while one is asked the others rest. Then the engines of
those whose KV is kept by another process are killed and started again, beside a vLLM alone, and the
same prompts come once more. Knows what is asked and how rows are made of it; engines are
`vllm_child`'s, servers `vllm_peers`' affair.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import vllm_child
import vllm_engine
import vllm_peers
from vllm_child import Child, Said
from vllm_engine import GIB, OURS, PEERS, Site, row
from vllm_ttft import links_apart

WAYS = ("memory", "pegaflow", "lmcache", "offloading", "simple", "example")
KEPT = ("memory", *vllm_peers.MODULES)  # By another process than the engine.
SHOWN = {"memory": "Forebay"} | PEERS
TURN_LIMIT_S = 90.0  # A turn that takes longer is stuck, and its engine is killed.
REST_S = 0.5  # Between turns: what has been computed is stored.

Writing = Callable[["list[Way]"], None]


@dataclass(frozen=True)
class Shape:
    """What is asked."""

    prompts: int
    tokens: int
    gap_s: float
    hbm_bytes: int  # Of an engine, for KV.
    hbm_prompts: int  # As many fit HBM together.


FULL = Shape(prompts=8, tokens=10_000, gap_s=0.25, hbm_bytes=8 * GIB, hbm_prompts=4)
TINY = Shape(prompts=4, tokens=1_000, gap_s=0.25, hbm_bytes=GIB // 16, hbm_prompts=4)


@dataclass
class Round:
    """What came of one turn. Lists are in the order of the prompts."""

    ttft_s: list[float]
    said: list[int]
    cached: list[int]
    cpu_s: float | None  # Of the engine and of what keeps KV; None where one of them went meanwhile.


@dataclass
class Found:
    """What one way did."""

    version: str = ""
    ready_s: float = 0.0
    cold: Round | None = None
    hbm: Round | None = None  # Asked again at once. Of vLLM alone.
    warm: list[Round] = field(default_factory=list)
    again_ready_s: float = 0.0
    again: Round | None = None  # Behind the restart.
    failed: str | None = None


@dataclass
class Way:
    """An engine, and what keeps its KV."""

    name: str
    site: Site
    keeper: int | None  # The process, if there is one.
    shape: Shape
    child: Child | None = None
    begun: float = 0.0
    found: Found = field(default_factory=Found)

    def start(self) -> None:
        """Starts the engine. `ready` waits for it."""
        arguments = vllm_engine.engine_arguments(self.site, self.name, self.shape.tokens + 64)
        arguments |= {"max_num_batched_tokens": 8192, "max_num_seqs": 64}
        if not self.site.tiny:
            # A share of the GPU that does not depend on who else takes memory meanwhile.
            arguments |= {
                "gpu_memory_utilization": 0.16,
                "kv_cache_memory_bytes": self.shape.hbm_bytes,
            }
        # Engines that start at the same time do not share a cache of compiled code.
        own = {"VLLM_CACHE_ROOT": str(self.site.folder / "cache")} | vllm_engine.QUIET
        self.begun = time.perf_counter()
        log = self.site.folder / "engine.log"
        self.child = Child(arguments, 0 if self.site.tiny else None, log, own)

    def ready(self) -> float:
        """Waits for the engine, and has its kernels compiled; seconds since its start."""
        assert self.child is not None
        self.found.version = self.child.ready()
        seconds = time.perf_counter() - self.begun
        draw = random.Random("warm up")
        prompt = self.draw(draw)
        for drop in (
            False,
            True,
            False,
        ):  # Computed, loaded where there is something to load, in HBM.
            self.child.arrivals([prompt], 0.0, drop)
        return seconds

    def draw(self, source: random.Random) -> list[int]:
        """A prompt."""
        return source.choices(range(3, self.site.model["vocab_size"]), k=self.shape.tokens)

    def turn(self, drop: bool, prompts: int | None = None) -> Round:
        """All prompts once."""
        assert self.child is not None
        source = random.Random("peers")
        asked = [self.draw(source) for _ in range(prompts or self.shape.prompts)]
        before_s = self.cpu_s()
        said: list[Said] = self.child.arrivals(asked, self.shape.gap_s, drop)
        cpu_s = self.cpu_s() - before_s
        found = Round([one.first_s for one in said], [one.tokens[0] for one in said], [], cpu_s)
        found.cached = [one.cached for one in said]
        mean_ms = 1e3 * statistics.mean(found.ttft_s)
        tell(f"{self.name}: mean {mean_ms:.1f} ms, {min(found.cached)} tokens and more not computed")
        return found

    def cpu_s(self) -> float:
        """Processor time so far."""
        assert self.child is not None
        kept_s = vllm_child.process_cpu_s(self.keeper) if self.keeper else 0.0
        return self.child.cpu_s() + kept_s

    def kill(self) -> None:
        """Ends the engine as a crash would."""
        if self.child is not None:
            self.child.process.kill()
            self.child.end()
            self.child = None

    def attempt(self, limit_s: float, do: Callable[[], None]) -> None:
        """Does something with the engine if nothing has failed yet. One that is stuck is killed."""
        if self.found.failed or self.child is None:
            return
        watch = threading.Timer(limit_s, self.child.process.kill)
        watch.start()
        try:
            do()
        except (SystemExit, OSError, ValueError) as failure:
            self.found.failed = str(failure)[-2000:]
            tell(f"{self.name} failed: {self.found.failed}")
            self.kill()
        finally:
            watch.cancel()


def tell(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def keeper_beside(site: Site, way: str) -> Iterator[int | None]:
    """What keeps KV of a way outside of its engine."""
    if way in vllm_peers.MODULES:
        with vllm_peers.server_beside(way, site.folder, site.memory_bytes) as server:
            yield server.pid
    else:
        with vllm_engine.node_beside(site, way) as node:
            yield None if node is None else node.process.pid


def all_turns(ways: list[Way], rounds: int, start_limit_s: float, keep: Callable[[], None]) -> None:
    """Cold, then warm in turns: each round begins with another way."""
    start_all(ways, start_limit_s)
    for way in ways:

        def cold(way: Way = way) -> None:
            way.found.cold = way.turn(drop=True)

        way.attempt(TURN_LIMIT_S, cold)
    time.sleep(REST_S)
    for number in range(rounds):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            way.attempt(TURN_LIMIT_S, lambda way=way: way.found.warm.append(way.turn(drop=True)))
            time.sleep(REST_S)
        keep()


def start_all(ways: list[Way], limit_s: float) -> None:
    """Starts all engines at the same time, and waits for them."""
    for way in ways:
        if not way.found.failed:
            way.start()
    for way in ways:

        def ready(way: Way = way) -> None:
            way.found.ready_s = way.ready()
            tell(f"{way.name}: ready after {way.found.ready_s:.0f} s")

        way.attempt(limit_s, ready)


def restart(ways: list[Way], plain: Way | None, limit_s: float) -> None:
    """New engines beside what kept KV, and vLLM alone, which has the hit in HBM and recomputing."""
    for way in ways:
        way.kill()
    kept = [way for way in ways if way.name in KEPT and not way.found.failed]
    before = {way.name: way.found.ready_s for way in kept}
    start_all([*kept, plain] if plain else kept, limit_s)
    for way in kept:
        way.found.ready_s, way.found.again_ready_s = before[way.name], way.found.ready_s

        def again(way: Way = way) -> None:
            way.found.again = way.turn(drop=True)

        way.attempt(TURN_LIMIT_S, again)
    if plain is not None:
        plain.attempt(TURN_LIMIT_S, lambda: alone(plain))


def alone(plain: Way) -> None:
    """vLLM alone: all prompts computed, then as many as fit HBM twice."""
    plain.found.cold = plain.turn(drop=True)
    plain.turn(drop=True, prompts=plain.shape.hbm_prompts)
    plain.found.hbm = plain.turn(drop=False, prompts=plain.shape.hbm_prompts)


def percentile(values: list[float], part: float) -> float:
    """The smallest value that so many are not above."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


@dataclass
class Results:
    """Everything that was measured."""

    found: dict[str, Found]
    link_bytes_s: float
    shape: Shape
    bytes_per_token: int

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows."""
        for figure in PARTS:
            yield from self.warm_rows(figure)
        for name, found in self.found.items():
            if found.cold:
                cold = f"peers.cold10k.mean{suffix(name)}"
                yield row(cold, "ms", [mean_ms(found.cold)], raw_ms=raw(found.cold))
        plain = self.found.get("plain")
        if plain and plain.hbm:
            yield row("peers.hbm10k.mean", "ms", [mean_ms(plain.hbm)], raw_ms=raw(plain.hbm))
        yield from self.restart_rows()

    def warm_rows(self, figure: str) -> Iterator[dict[str, Any]]:
        """One figure of warm prompts, of each way. A run is a round; p99 is of all prompts of all rounds."""
        part = PARTS[figure]
        rows = {}
        for name, found in self.found.items():
            if found.warm:
                runs = [1e3 * part(one.ttft_s) for one in found.warm]
                line = row(f"peers.warm10k.{figure}{suffix(name)}", "ms", runs)
                line["value"] = 1e3 * part([ttft for one in found.warm for ttft in one.ttft_s])
                rows[name] = line | self.about(name, line["value"])
        peers = {name: line["value"] for name, line in rows.items() if name not in OURS}
        if peers and "memory" in rows:
            best = min(peers, key=peers.__getitem__)
            version = self.found[best].version
            rows["memory"]["peer"] = {"name": SHOWN[best], "version": version, "value": peers[best]}
            rows["memory"]["of_best_peer"] = rows["memory"]["value"] / peers[best]
        yield from rows.values()

    def about(self, name: str, value: float) -> dict[str, Any]:
        """What a row of warm prompts says besides."""
        found = self.found[name]
        loaded = [cached for one in found.warm for cached in one.cached]
        more: dict[str, Any] = {
            "loaded_tokens": min(loaded),
            "raw_ms": [raw(one) for one in found.warm],
        }
        spent = [one.cpu_s for one in found.warm if one.cpu_s is not None]
        loaded_gb = sum(loaded) * self.bytes_per_token / 1e9
        if loaded_gb and len(spent) == len(found.warm):
            more["cpu_s_per_gb"] = sum(spent) / loaded_gb
        cold = None if found.cold is None else found.cold.said
        more["tokens_as_cold"] = all(one.said == cold for one in found.warm)
        plain = self.found.get("plain")
        if plain and plain.cold:
            more["tokens_as_alone"] = all(one.said == plain.cold.said for one in found.warm)
        if plain and plain.hbm:
            copied_ms = 1e3 * self.shape.tokens * self.bytes_per_token / self.link_bytes_s
            ceiling = copied_ms + mean_ms(plain.hbm)
            more |= {"ceiling": ceiling, "ratio": value / ceiling}
        return more

    def restart_rows(self) -> Iterator[dict[str, Any]]:
        """The first prompt behind a restart of the engine, and all of them."""
        for name, found in self.found.items():
            if found.again:
                cached, said = found.again.cached, found.again.said
                same = found.cold is not None and said == found.cold.said
                more = {"loaded_tokens": cached, "tokens_as_cold": same, "raw_ms": raw(found.again)}
                more["ready_s"] = found.again_ready_s
                first = [1e3 * found.again.ttft_s[0]]
                yield row(f"peers.restart.first_ms{suffix(name)}", "ms", first, **more)
                yield row(f"peers.restart.mean{suffix(name)}", "ms", [mean_ms(found.again)])


PARTS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.mean,
    "p50": statistics.median,
    "p99": lambda values: percentile(values, 0.99),
}


def suffix(way: str) -> str:
    """What stands behind a row's name: nothing for ours."""
    return "" if way in OURS else f".{way}"


def mean_ms(one: Round) -> float:
    """Of all prompts of a turn."""
    return 1e3 * statistics.mean(one.ttft_s)


def raw(one: Round) -> list[float]:
    """Milliseconds, in the order of the prompts."""
    return [round(1e3 * ttft, 2) for ttft in one.ttft_s]


def measure(args: argparse.Namespace, shape: Shape, scratch: Path, write: Writing) -> None:
    """All ways. One that fails is told of and left out."""
    program = vllm_engine.program(args.forebay) if set(args.ways) & set(OURS) else ""
    memory_bytes = int((args.memory_gib or (0.25 if args.tiny else 14)) * GIB)

    def site(name: str) -> Site:
        folder = scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        return Site(folder, args.tiny, memory_bytes, 0, program)

    with contextlib.ExitStack() as stack:
        ways = []
        for name in args.ways:
            way = Way(name, site(name), None, shape)
            ways.append(way)
            try:
                way.keeper = stack.enter_context(keeper_beside(way.site, name))
            except (SystemExit, OSError) as failure:
                way.found.failed = str(failure)[-2000:]
                tell(f"{name} failed: {way.found.failed}")
        plain = Way("plain", site("plain"), None, shape)
        everyone = [*ways, plain]
        try:
            all_turns(ways, args.rounds, args.start_limit, lambda: write(everyone))
            restart(ways, plain, args.start_limit)
        finally:
            for way in everyone:
                way.kill()
            write(everyone)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where peers.json and what it was made of go")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all but example")
    parser.add_argument("--rounds", type=int, default=5, help="of warm prompts (default 5)")
    parser.add_argument("--memory-gib", type=float, help="host memory for KV of each way (default 14)")
    parser.add_argument("--start-limit", type=float, default=240, help="seconds for a start (default 240)")
    parser.add_argument("--scratch", type=Path, help="for models, sockets and logs (default: in FOLDER)")
    parser.add_argument("--forebay", help="the forebay program")
    parser.add_argument("--tiny", action="store_true", help="a model of a few MB on the CPU, to try it")
    args = parser.parse_args()
    args.ways = args.ways or (["memory", "example"] if args.tiny else list(WAYS[:-1]))
    folder, shape = args.folder.absolute(), TINY if args.tiny else FULL
    scratch = (args.scratch or folder / "scratch").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    links = links_apart(folder, args.tiny)
    bytes_per_token = Site(scratch, args.tiny, 0, 0, "").bytes_per_token

    def write(ways: list[Way]) -> None:
        found = {way.name: way.found for way in ways}
        (folder / "peers-raw.json").write_text(json.dumps({name: asdict(one) for name, one in found.items()}))
        rows = list(Results(found, links["one"], shape, bytes_per_token).rows())
        rows.append(row("peers.link", "GB/s", [links["one"] / 1e9]))
        made = vllm_engine.results("peers_gpu", links["gpus"], None, rows)
        made["failed"] = {name: one.failed for name, one in found.items() if one.failed}
        (folder / "peers.json").write_text(json.dumps(made, indent=2) + "\n")

    measure(args, shape, scratch, write)
    for line in json.loads((folder / "peers.json").read_text())["rows"]:
        ceiling = f"ceiling {line['ceiling']:.1f} ratio {line['ratio']:.2f}" if "ceiling" in line else ""
        spread = f"{line['min']:.2f} to {line['max']:.2f} in {line['runs']}"
        print(f"{line['name']:<36} {line['value']:>9.2f} {line['unit']:<5} {spread} {ceiling}")


if __name__ == "__main__":
    main()
