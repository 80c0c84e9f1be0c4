#!/usr/bin/env python3
"""What engines notice when the program of their node is replaced, and the memory goes over.

    FOREBAY=target/release/forebay bench/upgrade.py [--gib 8] [--runs 5] [--json FILE]

A node's memory is filled, and two clients read from it all the time, comparing every byte. Then a successor
takes over (`forebay node --take-over`), as often as there are runs. Warm is what of the chunks before is
found 5 s after the successor was started; the gap is the longest time in which a client had no hit. What a
node without its predecessor's memory would find is nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]

from processes import binary, kill, line_of  # noqa: E402
from steady_load import LAYERS, Prompts, Reader  # noqa: E402
from vllm_engine import GIB, results, row  # noqa: E402

import forebay  # noqa: E402

LAYER_BYTES = 1 << 20
CHUNKS = 16
WARM_AFTER_S = 5.0
# The rest is room that a store needs.
FILLED = 0.9


def start(socket: Path, gib: int, *more: str) -> subprocess.Popen[str]:
    """A node that takes clients."""
    command = [binary(), "--end-with", str(os.getpid()), "node", "--memory", f"{gib}GiB"]
    node = subprocess.Popen([*command, "--socket", str(socket), *more], stdout=subprocess.PIPE, text=True)
    assert "forebay node" in line_of(node)
    return node


def cpu_s(process: subprocess.Popen[str]) -> float:
    """CPU time that it has had."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, default=8, help="memory of the node")
    parser.add_argument("--runs", type=int, default=5, help="how often it is replaced")
    parser.add_argument("--json", type=Path, help="where the results go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "node.sock"
        node = start(socket, args.gib)
        count = int(FILLED * args.gib * GIB / (LAYERS * LAYER_BYTES * CHUNKS))
        prompts = Prompts(count, CHUNKS, LAYER_BYTES)
        prompts.store(socket)
        asks = forebay.Node(socket, name="asks")
        before = prompts.found(asks)
        readers = [Reader(socket, prompts, seed) for seed in range(2)]
        warm, gaps, took, cpu = [], [], [], []
        for _ in range(args.runs):
            time.sleep(2)
            begun = time.monotonic()
            successor = start(socket, args.gib, "--take-over")
            took.append(1e3 * (time.monotonic() - begun))
            time.sleep(max(0.0, begun + WARM_AFTER_S - time.monotonic()))
            warm.append(100 * prompts.found(asks) / before)
            gaps.append(1e3 * max(reader.longest_gap(begun, time.monotonic()) for reader in readers))
            cpu.append(1e3 * cpu_s(successor))
            node.wait(60)
            kill(node)
            node = successor
        for reader in readers:
            reader.stop()
        failed = [why for reader in readers for why in reader.failed]
        hits, misses = (sum(len(r.hits) for r in readers), sum(r.misses for r in readers))
        kill(node)
    print(f"{before} chunks; {hits} hits, {misses} misses, failed: {failed[:3]}")
    rows = [
        row("upgrade.warm_percent", "%", warm, ceiling=100.0, ratio=min(warm) / 100, least=99.0),
        row("upgrade.failed", "reads", [float(len(failed))], ceiling=0.0, hits=hits, misses=misses),
        row("upgrade.gap_ms", "ms", gaps),
        row("upgrade.took_ms", "ms", took, cpu_ms=cpu),
    ]
    for each in rows:
        print(f"{each['name']}: {each['value']:.1f} {each['unit']} ({each['min']:.1f} to {each['max']:.1f})")
    if args.json:
        args.json.write_text(json.dumps(results("upgrade", [], None, rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
