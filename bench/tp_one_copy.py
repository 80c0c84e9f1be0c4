#!/usr/bin/env python3
"""What one copy for all TP sizes costs: KV stored and loaded as a chunk for each head, and as whole pages.

    bench/tp_one_copy.py [--tokens 4096] [--runs N] [--json FILE]

An engine of one rank with the KV of an 8B model (8 heads) in host memory, and a node. Both layouts take turns
in one process, with the same bytes in the same pages. Blocks lie anywhere, as in an engine that has run for a
while; rows that end with `in_order` are of blocks one after another, as of a fresh one, where whole pages of
neighbours are one copy. The ceiling is a copy of as many bytes by as many threads. Knows
`forebay.PagedCache` and numpy; must never know an engine.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import vllm_engine
from vllm_engine import BF16_BYTES, BLOCK_TOKENS, CHUNK_TOKENS, Node, Site, row

import forebay

LIMIT_S = 120.0
COPY_THREADS = 2
CEILING_RUNS = 5
NAMESPACE: dict[str, Any] = {
    "weights": bytes(32),
    "dtype": "bfloat16",
    "order": "HND",
    "block_tokens": BLOCK_TOKENS,
    "tp": (0, 1),
    "pp": (0, 1),
    "attention": {},
    "lora": None,
    "salt": b"",
}


@dataclass
class Run:
    """One store and one load."""

    store_s: float
    load_s: float
    store_cpu_s: float
    load_cpu_s: float


@dataclass
class Pages:
    """KV in pages, and the cache that moves them."""

    site: Site
    node: Node
    tokens: int
    stored: int = 0
    job: int = 0
    kv: npt.NDArray[np.uint8] = field(init=False)
    kept: npt.NDArray[np.uint8] = field(init=False)
    cache: forebay.PagedCache = field(init=False)

    def __post_init__(self) -> None:
        model = self.site.model
        self.heads, self.layers = model["num_key_value_heads"], model["num_hidden_layers"]
        self.blocks = self.tokens // BLOCK_TOKENS
        page_bytes = self.heads * BLOCK_TOKENS * 2 * model["head_dim"] * BF16_BYTES
        random = np.random.default_rng(1)
        self.kv = random.integers(1, 255, (self.layers, self.blocks, page_bytes), dtype=np.uint8)
        self.kept = self.kv.copy()
        self.anywhere = random.permutation(self.blocks).astype(np.int32)
        self.cache = forebay.PagedCache(
            str(self.site.socket),
            [(int(layer.ctypes.data), self.blocks, page_bytes, page_bytes, 0) for layer in self.kv],
            page_tokens=[BLOCK_TOKENS],
            chunk_tokens=self.site.chunk_tokens,
            heads=[self.heads],
            copy_threads=COPY_THREADS,
        )

    @property
    def size_bytes(self) -> int:
        return int(self.kv.nbytes)

    def run(self, parts: int, blocks: npt.NDArray[np.int32], check: bool = False) -> Run:
        """Stores the KV under new names, and loads it again. If wanted, compares every byte."""
        self.stored += 1
        own = NAMESPACE | {"salt": str(self.stored).encode()}
        size, each = self.site.chunk_tokens, self.heads // parts
        keys = [forebay.namespace_key(own | {"tp": (part, parts)}) for part in range(parts)]
        ids = [forebay.chunk_ids(key, list(range(self.tokens)), size) for key in keys]
        chunks = [[(one, names[n - 1] if n else None, size) for n, one in enumerate(names)] for names in ids]
        sources = [(names, 0, part * each, each) for part, names in enumerate(ids)]
        store_s, store_cpu_s = self.timed(lambda: self.store(chunks, blocks))
        if check:
            self.kv[:] = 0
        load_s, load_cpu_s = self.timed(lambda: self.load(sources, blocks))
        if check and not np.array_equal(self.kv, self.kept):
            sys.exit(f"pages loaded in {parts} parts are not those that were stored")
        return Run(store_s, load_s, store_cpu_s, load_cpu_s)

    def timed(self, what: Any) -> tuple[float, float]:
        """Seconds, and those of all processors in this process and in the node."""
        begun, cpu_s = time.perf_counter(), self.cpu_s()
        what()
        return time.perf_counter() - begun, self.cpu_s() - cpu_s

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.node.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def store(self, chunks: list[list[tuple[bytes, bytes | None, int]]], blocks: Any) -> None:
        self.job += 1
        self.cache.store(self.job, chunks, [blocks])
        if not self.cache.wait_stored([self.job], LIMIT_S):
            sys.exit(f"chunks were not stored in {LIMIT_S:.0f} s")
        if (ended := self.cache.take_ended()[1]) != [(self.job, [])]:
            sys.exit(f"not all chunks were stored: {ended}")

    def load(self, sources: Sequence[tuple[list[bytes], int, int, int]], blocks: Any) -> None:
        self.job += 1
        self.cache.load(self.job, sources, [blocks], tokens=self.tokens, layerwise=True)
        self.cache.wait_loads()
        if not self.cache.wait_loaded([self.job], LIMIT_S):
            sys.exit(f"not loaded in {LIMIT_S:.0f} s")
        if (ended := self.cache.take_ended()[0]) != [(self.job, self.tokens, None)]:
            sys.exit(f"not all of {self.tokens} tokens were loaded: {ended}")


def ceiling_gbps(pages: Pages) -> float:
    """A copy of as many bytes by as many threads: the best of some."""
    there = np.zeros_like(pages.kv).reshape(-1)
    halves = [np.array_split(one, COPY_THREADS) for one in (there, pages.kv.reshape(-1))]
    cuts = list(zip(*halves, strict=True))

    def once() -> float:
        begun = time.perf_counter()
        with ThreadPoolExecutor(COPY_THREADS) as threads:
            list(threads.map(lambda cut: np.copyto(*cut), cuts))
        return pages.size_bytes / (time.perf_counter() - begun) / 1e9

    return max(once() for _ in range(CEILING_RUNS))


def measure(site: Site, tokens: int, runs: int) -> dict[str, Any]:
    """All rows, in one process with a node beside it."""
    with vllm_engine.node_beside(site, "memory") as node:
        assert node is not None
        pages = Pages(site, node, tokens)
        orders = {"": pages.anywhere, ".in_order": np.sort(pages.anywhere)}
        # The node's memory is used once before anything is timed: the first use of a page takes
        # longer.
        for _ in range(-(-site.memory_bytes // (4 * pages.size_bytes))):
            for parts in (1, pages.heads):
                pages.run(parts, pages.anywhere, check=True)
        ceiling = ceiling_gbps(pages)
        rows = [
            line for name, blocks in orders.items() for line in of_order(pages, name, blocks, runs, ceiling)
        ]
        pages.cache.close()
    return vllm_engine.results("tp_one_copy", [], None, rows)


def of_order(
    pages: Pages, order: str, blocks: npt.NDArray[np.int32], runs: int, ceiling: float
) -> Iterator[dict[str, Any]]:
    """The rows of blocks in one order."""
    whole: list[Run] = []
    heads: list[Run] = []
    for number in range(runs):
        layouts = [(1, whole), (pages.heads, heads)]
        for parts, found in layouts if number % 2 else layouts[::-1]:
            found.append(pages.run(parts, blocks))
    for what in ("store", "load"):
        took = [[getattr(run, f"{what}_s") for run in found] for found in (whole, heads)]
        cpu = [sum(getattr(run, f"{what}_cpu_s") for run in found) for found in (whole, heads)]
        rates = [[pages.size_bytes / seconds / 1e9 for seconds in of_layout] for of_layout in took]
        ratios = [one / other for other, one in zip(*rates, strict=True)]
        peer = {
            "name": "whole pages",
            "version": vllm_engine.commit(),
            "value": statistics.median(rates[0]),
        }
        for name, of_layout, seconds in zip(("whole_pages", "one_copy"), rates, cpu, strict=True):
            line = row(f"tp.{name}.{what}{order}", "GB/s", of_layout)
            line |= {"ceiling": ceiling, "ratio": line["value"] / ceiling}
            line |= {"cpu_s_per_gb": seconds / (runs * pages.size_bytes / 1e9)}
            more = ""
            if name == "one_copy":
                line |= {"peer": peer, "of_whole_pages": statistics.median(ratios)}
                more = (
                    f"  of whole pages {line['of_whole_pages']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                )
            print(
                f"{line['name']:<32} {line['value']:7.3f} GB/s {line['min']:7.3f} to {line['max']:7.3f}"
                f"  ceiling {ceiling:7.3f} ratio {line['ratio']:.3f}"
                f"  CPU {line['cpu_s_per_gb']:.3f} s/GB{more}",
                flush=True,
            )
            yield line


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the prefix (default 4096)")
    parser.add_argument("--runs", type=int, default=11, help="of each layout and order (default 11)")
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS, help="default: as the connector")
    parser.add_argument("--json", type=Path, help="write the results object to this file")
    parser.add_argument("--forebay", help="the forebay program")
    parser.add_argument("--tiny", action="store_true", help="with a few MB, to see that it works")
    args = parser.parse_args()
    if args.runs < 1 or args.tokens < 1 or args.tokens % args.chunk_tokens:
        parser.error(f"--runs {args.runs} --tokens {args.tokens}: allowed are 1 run and more, whole chunks")
    with TemporaryDirectory() as folder:
        site = Site(Path(folder), args.tiny, 0, 0, vllm_engine.program(args.forebay), args.chunk_tokens)
        memory = max(4 * args.tokens * site.bytes_per_token, 64 << 20)
        site = Site(site.folder, site.tiny, memory, 0, site.forebay, site.chunk_tokens)
        made = measure(site, args.tokens, args.runs)
    if args.json:
        args.json.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
