#!/usr/bin/env python3
"""What saying `prefetch` gains: a session comes back whose KV lies on the SSD, with a real node.

    FOREBAY=PROGRAM bench/session_prefetch.py --dir FOLDER [--rounds 20] [--json FILE]

The session has 8k tokens, as a rank of four of an 8B model keeps them: 128 chunks of 2 MiB. In each round it
is loaded from memory, from the SSD, and from where it is some time after `prefetch` was said, in an order
that differs from round to round. Before each load the session was demoted, and others fill the memory. Every
byte is compared outside of the measured time. There is no engine: a load is that part of the time to the
first token in which KV comes. Knows `forebay.PagedCache` and the verbs of `forebay.Node`.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
# A checkout has the extension only if it was built there: an installed package comes first.
sys.path += [str(ROOT / "tests"), str(ROOT / "python")]

from processes import kill, start_node, until  # noqa: E402
from vllm_engine import results, row  # noqa: E402

import forebay  # noqa: E402

CHUNK_TOKENS, PAGE_TOKENS, HEADS = 64, 16, 2
NAMESPACE = bytes(range(32))
LIMIT_S = 60.0
LEADS_MS = (0, 50, 100, 250, 500, 1000, 2000)
ASKED_RATIO = 1.05
# As many sessions fill the memory exactly; the one that comes back is one more.
OTHERS = 4
CONFIG = """socket = '{folder}/node.sock'
write_back = 'all'
[memory]
size = '{memory}'
chunk_size = '{chunk}'
largest_chunk = '{chunk}'
overcommit = true
[[ssd]]
path = '{folder}/log'
size = '{log}'
segment_size = '{segment}'
"""


@dataclass(frozen=True)
class Size:
    """How much KV there is."""

    layers: int = 32
    layer_bytes: int = 1 << 10  # Of a token.
    chunks: int = 128

    @property
    def chunk_bytes(self) -> int:
        """Of all layers."""
        return self.layers * self.layer_bytes * CHUNK_TOKENS

    @property
    def session_bytes(self) -> int:
        """Of all chunks."""
        return self.chunks * self.chunk_bytes

    def config(self, folder: Path) -> str:
        """A node whose memory has room for all sessions but one, and whose log has room for all."""
        memory, segment = OTHERS * self.session_bytes, max(8 * self.chunk_bytes + (1 << 20), 4 << 20)
        # A log needs some segments beside those that are full.
        log = (2 * (OTHERS + 1) * self.session_bytes // segment + 16) * segment
        return CONFIG.format(folder=folder, memory=memory, chunk=self.chunk_bytes, log=log, segment=segment)


def cpu_s(pid: int) -> float:
    """Processor time of a process, in nanosecond steps: its clock has a number that follows from its own."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass
class Load:
    """What a load took."""

    ms: float
    cpu_ms: float  # Of this process and the node, since `prefetch` was said, if it was.
    disk_percent: float  # Of the bytes, by the place that they had when the load began.


@dataclass
class Bench:
    """An engine's pages, and sessions that are in a node's memory and log."""

    folder: Path
    size: Size
    node_pid: int
    base: npt.NDArray[np.uint8] = field(init=False)
    pages: npt.NDArray[np.uint8] = field(init=False)
    jobs: int = 0
    turn: int = 0

    def __post_init__(self) -> None:
        """Connects, and stores all sessions."""
        shape = (self.size.layers, self.size.chunks * CHUNK_TOKENS * self.size.layer_bytes)
        self.base = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        self.pages = np.zeros_like(self.base)
        page_bytes = PAGE_TOKENS * self.size.layer_bytes
        pages = shape[1] // page_bytes
        layers = [(int(layer.ctypes.data), pages, page_bytes, page_bytes, 0) for layer in self.pages]
        socket = self.folder / "node.sock"
        self.node = forebay.Node(socket, name="platform")
        self.cache = forebay.PagedCache(
            socket, layers, page_tokens=[PAGE_TOKENS], chunk_tokens=CHUNK_TOKENS, heads=[HEADS]
        )
        self.blocks = np.arange(pages, dtype=np.int32)
        tokens = self.size.chunks * CHUNK_TOKENS
        self.ids = [
            forebay.chunk_ids(NAMESPACE, [number] * tokens, CHUNK_TOKENS) for number in range(OTHERS + 1)
        ]
        for number in range(OTHERS + 1):
            self.store(number)

    def close(self) -> None:
        """Ends both clients."""
        self.cache.close()
        self.node.close()

    def store(self, number: int) -> None:
        """Stores a session, and waits until it can be demoted."""
        np.bitwise_xor(self.base, np.uint8(number), out=self.pages)
        self.jobs += 1
        ids = self.ids[number]
        chunks = [(id, parent, CHUNK_TOKENS) for id, parent in zip(ids, [None, *ids], strict=False)]
        self.cache.store(self.jobs, [chunks], [self.blocks])
        assert self.cache.wait_stored([self.jobs], LIMIT_S)
        _, [(_, missing)] = self.cache.take_ended()
        assert not missing, f"not stored: {missing}"
        self.demote(number)

    def places(self, number: int) -> set[str]:
        """Where the chunks of a session are."""
        return {place for _, _, place, _ in self.node.list_chunks(self.ids[number])}

    def demote(self, number: int) -> None:
        """Has a session leave memory. A chunk that is not on the SSD yet is asked for again."""

        def left() -> bool:
            self.node.demote(self.ids[number])
            return self.places(number) == {"disk"}

        until(left, LIMIT_S)

    def bring(self, number: int) -> None:
        """Has a session in memory."""
        self.node.prefetch(self.ids[number])
        until(lambda: self.places(number) == {"memory"}, LIMIT_S)

    def send_away(self) -> None:
        """Demotes the session 0, and has the others fill the memory, so that its return evicts some."""
        self.demote(0)
        for number in range(1, OTHERS + 1):
            self.bring(number)

    def load(self, number: int, begun_cpu_s: float | None = None) -> Load:
        """Loads a session into the pages as the vLLM connector does, and compares all bytes."""
        self.pages.fill(0)
        self.jobs += 1
        before = self.cache.stats()
        begun_cpu_s = self.cpu_s() if begun_cpu_s is None else begun_cpu_s
        begun = time.perf_counter()
        tokens = self.size.chunks * CHUNK_TOKENS
        sources = [(self.ids[number], 0, 0, HEADS)]
        self.cache.load(self.jobs, sources, [self.blocks], tokens=tokens, layerwise=False)
        assert self.cache.wait_loaded([self.jobs], LIMIT_S)
        took, cpu = time.perf_counter() - begun, self.cpu_s() - begun_cpu_s
        [(_, loaded, why)], _ = self.cache.take_ended()
        assert loaded == tokens, why
        after = self.cache.stats()
        self.pages ^= np.uint8(number)
        assert np.array_equal(self.pages, self.base), "wrong bytes"
        disk = after["bytes_disk"] - before["bytes_disk"]
        return Load(1e3 * took, 1e3 * cpu, 100 * disk / self.size.session_bytes)

    def cpu_s(self) -> float:
        """Processor time of both processes."""
        return time.process_time() + cpu_s(self.node_pid)

    def from_memory(self, rest_s: float) -> Load:
        """A load of the session where all of it has been in memory for that long."""
        self.send_away()
        self.bring(0)
        time.sleep(rest_s)
        return self.load(0)

    def from_disk(self) -> Load:
        """A load of the session where none of it is."""
        self.send_away()
        return self.load(0)

    def announced(self, lead_ms: float) -> Load:
        """A load so long after `prefetch` was said."""
        self.send_away()
        self.pages.fill(0)
        begun, begun_cpu_s = time.perf_counter(), self.cpu_s()
        self.node.prefetch(self.ids[0])
        time.sleep(max(0.0, begun + lead_ms / 1e3 - time.perf_counter()))
        return self.load(0, begun_cpu_s)

    def coming_ms(self) -> float:
        """From saying `prefetch` until all chunks are in memory, asked every few milliseconds."""
        self.send_away()
        begun = time.perf_counter()
        self.bring(0)
        return 1e3 * (time.perf_counter() - begun)


def measured(bench: Bench, rounds: int) -> dict[str, list[Load]]:
    """All cases, in turns."""
    cases = {
        # As long a rest as before a load that was announced: caches and threads are as cold.
        "memory": lambda: bench.from_memory(max(LEADS_MS) / 1e3),
        "memory.at_once": lambda: bench.from_memory(0.0),
        "ssd": bench.from_disk,
    }
    cases |= {f"ahead.{lead}ms": lambda lead=lead: bench.announced(lead) for lead in LEADS_MS}
    found: dict[str, list[Load]] = {name: [] for name in cases}
    order = random.Random(1)
    for number in range(rounds):
        for name in order.sample(list(cases), len(cases)):
            found[name].append(cases[name]())
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def rows_of(found: dict[str, list[Load]], coming: Sequence[float], size: Size) -> list[dict[str, Any]]:
    """A row for each case, and the ratio that is asked for."""
    memory = [load.ms for load in found["memory"]]
    ceiling, session_gb = statistics.median(memory), size.session_bytes / 1e9
    rows = []
    for name, loads in found.items():
        took = [load.ms for load in loads]
        rows.append(
            row(
                f"hints.load_ms.{name}", "ms", took,
                ceiling=ceiling,
                ratio=statistics.median(took) / ceiling,
                gb_per_s=session_gb / statistics.median(took) * 1e3,
                cpu_ms=statistics.mean(load.cpu_ms for load in loads),
                disk_percent=statistics.mean(load.disk_percent for load in loads),
            )
        )  # fmt: skip
    ratios = [load.ms / hit for load, hit in zip(found["ahead.2000ms"], memory, strict=True)]
    prefetched = statistics.median(load.ms for load in found["ahead.2000ms"])
    at_once = statistics.median(load.ms for load in found["memory.at_once"])
    asked = {"ceiling": 1.0, "asked": ASKED_RATIO}
    asked |= {"of_medians": prefetched / ceiling, "of_medians_at_once": prefetched / at_once}
    rows.append(row("hints.prefetch_ttft_ratio", "of a memory hit", ratios, **asked))
    rows.append(row("hints.prefetch_ms", "ms", list(coming), gb=session_gb))
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="on the disk that has the log")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=Size.chunks, help="of the session")
    parser.add_argument("--disk", default="virtual", help="its name, for the results")
    parser.add_argument("--json", type=Path, help="where the results go")
    args = parser.parse_args()
    size, load_before = Size(chunks=args.chunks), os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="session-"))
    node, bench = None, None
    try:
        config = folder / "node.toml"
        config.write_text(size.config(folder))
        node = start_node(config)
        bench = Bench(folder, size, node.pid)
        bench.from_memory(0.0)  # The first one of a process takes longer.
        found = measured(bench, args.rounds)
        coming = [bench.coming_ms() for _ in range(args.rounds)]
    finally:
        if bench:
            bench.close()
        kill(node)
        shutil.rmtree(folder)
    rows = [each | {"load_average": round(load_before, 1)} for each in rows_of(found, coming, size)]
    for each in rows:
        print(f"{each['name']}: {each['value']:.2f} {each['unit']} ({each['min']:.2f} to {each['max']:.2f})")
    if args.json:
        said = results("session-prefetch", [], args.disk, rows)
        args.json.write_text(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    main()
