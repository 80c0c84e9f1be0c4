#!/usr/bin/env python3
"""What the connector costs a vLLM: in steps with nothing to move, and for a prefix in the node's memory.

    bench/vllm_steps.py --json FILE [--gpu]

Steps in which requests decode are timed in one engine with its connector and without, in turns; then in
another one whose connector does nothing. On a host without GPUs, or, with `--gpu`, on the first one with a
model shaped like Llama-3.1-8B. Without GPUs also hits, of a prefix that vLLM has dropped: the time from the
lookup until its last layer is there, and how much of it the engine's thread spent in the connector; once in a
cache of a few MB and once in one shaped like Llama-3.1-8B's, beside a plain copy of as many bytes. Knows what
is measured and how rows are made of it; engines are `vllm_child`'s and `vllm_engine`'s.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_child import Child
from vllm_engine import GIB, LLAMA_8B, TINY, Site, row

BATCHES = (8, 64)
CHUNK_TOKENS = 256  # With the prompts and steps below none becomes whole: there is nothing to store.
PROMPT_TOKENS = 16
STEPS = 10
TURNS = 9
ROUNDS = 7
PREFIX_TOKENS = 6 * CHUNK_TOKENS
HITS = 15
COPY_RUNS = 9
COPY_THREADS = 2  # As many as the connector has.
# As many bytes of KV for a token as Llama-3.1-8B has, and hardly anything to compute.
WIDE = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 2000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Shaped(Site):
    """A site with a model of its own."""

    shape: str = "tiny"

    @property
    def model(self) -> dict[str, Any]:
        """What `config.json` says."""
        return {"tiny": TINY, "8b": WIDE if self.tiny else LLAMA_8B}[self.shape]


def start(site: Site, way: str) -> Child:
    """An engine that steps where it is asked."""
    given = vllm_engine.engine_arguments(site, way, 4096)
    given |= {"distributed_executor_backend": "uni", "max_num_batched_tokens": 4096}
    return Child(given, 0 if site.tiny else None, site.folder / f"{way}.log")


def measure_steps(site: Site, rounds: int) -> Iterator[dict[str, Any]]:
    """Decode steps, with our connector and with one that does nothing, each beside none."""
    for way, suffix in (("memory", ""), ("nothing", ".nothing")):
        engine = start(site, way)
        version = engine.ready()
        for batch in BATCHES:
            # The first round is for caches.
            found = [engine.steps(batch, PROMPT_TOKENS, TURNS, STEPS) for _ in range(rounds + 1)][1:]
            pairs = [pair for one in found for pair in one]
            alone = statistics.median(detached for _, detached in pairs)
            peer = {"name": "without a connector", "version": version, "value": 1e3 * alone}
            name = f"{batch}{suffix}"
            yield row(f"vllm.steps.decode_ms.{name}", "ms", [1e3 * one for one, _ in pairs], peer=peer)
            yield row(f"vllm.steps.overhead_us.{name}", "us", [1e6 * (one - other) for one, other in pairs])
            percent = [100 * (one / other - 1) for one, other in pairs]
            yield row(f"vllm.steps.overhead_percent.{name}", "%", percent)
        engine.end()


def measure_hits(site: Shaped, hits: int) -> Iterator[dict[str, Any]]:
    """A prefix in the node's memory, by both ways of loading."""
    engine = start(site, "memory")
    engine.ready()
    size = PREFIX_TOKENS * site.bytes_per_token
    ceiling_ms = 1e3 * statistics.median(copies(size))
    for way in ("layerwise", "background"):
        found = engine.hits(PREFIX_TOKENS, hits, way == "layerwise")
        # In the background the engine has nothing else to do than to wait inside.
        for figure in ("ready", "inside", "load") if way == "layerwise" else ("ready", "load"):
            one = row(
                f"vllm.hit.{figure}_ms.{site.shape}.{way}", "ms", [1e3 * hit[f"{figure}_s"] for hit in found]
            )
            yield one | {"ceiling": ceiling_ms, "ratio": one["value"] / ceiling_ms, "bytes": size}
    engine.end()


def gpus() -> list[str]:
    """The GPU that is measured on."""
    import torch

    return [torch.cuda.get_device_name(0)]


def copies(size: int) -> list[float]:
    """Seconds of plain copies of so many bytes, from and to memory that was touched before."""
    import numpy as np

    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    parts = [
        slice(size * part // COPY_THREADS, size * (part + 1) // COPY_THREADS) for part in range(COPY_THREADS)
    ]
    times = []
    with ThreadPoolExecutor(COPY_THREADS) as threads:
        for _ in range(COPY_RUNS):
            begun = time.perf_counter()
            list(threads.map(lambda part: np.copyto(target[part], source[part]), parts))
            times.append(time.perf_counter() - begun)
    return times


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--gpu", action="store_true", help="decode steps on the first GPU")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of {TURNS} pairs of turns each")
    parser.add_argument("--hits", type=int, default=HITS)
    parser.add_argument("--forebay", help="the program")
    args = parser.parse_args()
    load, made, program = os.getloadavg()[0], [], vllm_engine.program(args.forebay)
    for shape in ("8b",) if args.gpu else ("tiny", "8b"):
        with tempfile.TemporaryDirectory() as folder:
            memory = GIB if shape == "tiny" else 4 * GIB
            site = Shaped(Path(folder), not args.gpu, memory, GIB, program, CHUNK_TOKENS, shape)
            with vllm_engine.node_beside(site, "memory"):
                found = measure_steps(site, args.rounds) if args.gpu or shape == "tiny" else iter(())
                for one in found if args.gpu else chain(found, measure_hits(site, args.hits)):
                    # Each at once, for whoever has the machine for less time than this takes.
                    made.append(one)
                    said = vllm_engine.results("vllm_steps", gpus() if args.gpu else [], None, made)
                    said["machine"]["load_before"] = round(load, 2)
                    args.json.write_text(json.dumps(said, indent=2) + "\n")
                    spread = f"({one['min']:.3f} to {one['max']:.3f})"
                    print(f"{one['name']:44} {one['value']:9.3f} {one['unit']} {spread}", flush=True)


if __name__ == "__main__":
    main()
