#!/usr/bin/env python3
"""How long a node's memory takes to be there and to be pinned, and whom that holds up.

    bench/pin.py FOLDER [--gib 100]

A node starts with so much memory, which it touches first. Then an engine's cache attaches to it, and CUDA
registers all of it; the first prefix that is loaded waits for that. Meanwhile another process copies a few
bytes to a GPU, again and again: to the last one, where there are several. The longest that one of its copies
takes is the stall. Knows `forebay.PagedCache` and torch; must never know an engine.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import vllm_engine
from vllm_engine import CHUNK_TOKENS, GIB, Node, Site, row
from vllm_layers import Pages

PROBE = """
import sys, time, torch
device = torch.device("cuda", torch.cuda.device_count() - 1)
here, there = torch.zeros(64).pin_memory(), torch.zeros(64, device=device)
print("ready", flush=True)
while True:
    begun = time.monotonic()
    there.copy_(here)
    torch.cuda.synchronize(device)
    print(begun, time.monotonic() - begun)
"""


class Probe:
    """A process that copies to a GPU all the time, and notes how long each copy takes."""

    def __init__(self, log: Path) -> None:
        """It copies when this returns."""
        self.log = log
        self.process = subprocess.Popen([sys.executable, "-c", PROBE], stdout=log.open("w"))
        while "ready" not in log.read_text():
            if self.process.poll() is not None:
                sys.exit("the process that copies has ended")
            time.sleep(0.1)

    def stop(self) -> list[tuple[float, float]]:
        """When each copy began, and the seconds that it took."""
        self.process.kill()
        self.process.wait()
        pairs = (line.split() for line in self.log.read_text().splitlines()[1:-1])
        return [(float(begun), float(took)) for begun, took in pairs]


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where pin.json goes")
    parser.add_argument("--gib", type=int, default=100, help="memory of the node")
    parser.add_argument("--forebay", help="the program")
    parser.add_argument("--gpu", action="append", default=[], help="its name, for the results")
    args = parser.parse_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    import torch

    site = Site(folder, False, args.gib * GIB, 0, vllm_engine.program(args.forebay), CHUNK_TOKENS)
    probe = Probe(folder / "probe.log")
    time.sleep(2.0)
    marks = [time.monotonic()]
    node = Node(site, disk=False)
    marks.append(time.monotonic())
    pages = Pages(site, torch.device("cuda", 0), CHUNK_TOKENS)
    pages.draw()
    pages.store([bytes(32)], CHUNK_TOKENS)
    pages.load([bytes(32)], CHUNK_TOKENS, None)
    marks.append(time.monotonic())
    copies = probe.stop()
    node.stop()
    stalls = {
        name: max((took for at, took in copies if begun <= at + took and at < end), default=0.0) * 1e3
        for name, begun, end in (
            ("alone", 0.0, marks[0]),
            ("touching", marks[0], marks[1]),
            ("pinning", marks[1], marks[2]),
        )
    }
    memory = {"memory_gib": args.gib}
    rows = [
        row("pin.touch_s", "s", [marks[1] - marks[0]], **memory),
        row(f"pin.{args.gib}gib_s", "s", [marks[2] - marks[1]], **memory),
        *(row(f"pin.stall_ms.{name}", "ms", [value], **memory) for name, value in stalls.items()),
    ]
    for line in rows:
        print(f"{line['name']:24} {line['value']:10.3f} {line['unit']}")
    results = vllm_engine.results("pin", args.gpu, None, rows)
    (folder / "pin.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
