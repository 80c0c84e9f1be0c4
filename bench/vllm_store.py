#!/usr/bin/env python3
"""Processor time that storing a prompt's KV takes, by who makes its checksums: pages as vLLM has, no vLLM.

    bench/vllm_store.py --json FILE [--tokens 131072] [--runs N] [--tiny]

A process on one GPU has its node keep a prefix that nobody has seen, again and again, with `verify = gpu`
and with `verify = host`. What is counted is the processor time of that process, where an engine would be,
and of the node, until all is stored. Knows `vllm_layers`' pages; must never know an engine.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_child import process_cpu_s
from vllm_engine import GIB, Node, Site, row
from vllm_layers import NAMESPACE, Pages, Verifier

import forebay

TOKENS, TINY_TOKENS = 131072, 1024
RUNS = 5


def measure(site: Site, verify: Verifier, tokens: int, runs: int) -> list[float]:
    """Processor seconds of each store. A first one is not kept."""
    os.environ.update(site.environment("memory"))  # Before anybody looks how many GPUs there are.
    import torch

    device = torch.device("cpu") if site.tiny else torch.device("cuda", 0)
    found = []
    with vllm_engine.node_beside(site, "memory") as node:
        assert node is not None
        pages = Pages(site, device, tokens, "host" if site.tiny else verify)
        for run in range(runs + 1):
            key = forebay.namespace_key(NAMESPACE | {"salt": str(run).encode()})
            ids = forebay.chunk_ids(key, list(range(tokens)), site.chunk_tokens)
            pages.draw()
            begun = cpu_s(node)
            pages.store(ids, tokens)
            found.append(cpu_s(node) - begun)
        pages.cache.close()
    return found[1:]


def cpu_s(node: Node) -> float:
    """Processor time of this process and the node so far."""
    return time.process_time() + process_cpu_s(node.process.pid)


def rows(found: dict[Verifier, list[float]], site: Site, tokens: int) -> list[dict[str, Any]]:
    """The figures, in seconds of a processor: less is better."""
    name, gb = f"store.{tokens // 1024}k.cpu_s", tokens * site.bytes_per_token / 1e9
    by_gpu, by_host = row(name, "s", found["gpu"]), row(f"{name}.host", "s", found["host"])
    for one in (by_gpu, by_host):
        one["cpu_s_per_gb"] = one["value"] / gb
    value = by_host["value"]
    by_gpu |= {"peer": {"name": "verify = host", "version": vllm_engine.commit(), "value": value}}
    return [by_gpu | {"x_peer": by_gpu["value"] / value}, by_host]


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--tokens", type=int, help="of the prefix, a multiple of 64")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--forebay", help="the program")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, where only the host checks")
    args = parser.parse_args()
    tokens = args.tokens or (TINY_TOKENS if args.tiny else TOKENS)
    found: dict[Verifier, list[float]] = {}
    verifiers: tuple[Verifier, ...] = ("gpu", "host")
    with tempfile.TemporaryDirectory() as folder:
        memory_bytes = GIB if args.tiny else 2 * tokens * (128 << 10) + 4 * GIB
        site = Site(Path(folder), args.tiny, memory_bytes, 0, vllm_engine.program(args.forebay))
        for verify in verifiers:
            found[verify] = measure(site, verify, tokens, args.runs)
    said = vllm_engine.results("vllm_store", [], None, rows(found, site, tokens))
    args.json.write_text(json.dumps(said, indent=2) + "\n")
    for one in said["rows"]:
        print(f"{one['name']:32} {one['value']:8.3f} {one['unit']} {one.get('x_peer', '')}")


if __name__ == "__main__":
    main()
