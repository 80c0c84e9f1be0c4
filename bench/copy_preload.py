#!/usr/bin/env python3
"""Copies of an unmodified PyTorch program with and without the preload library, 1 GiB of pinned memory.

Runs a child with and a child without `libforebay_preload.so`, in turn, `--rounds` times. Each child copies
until the library has started, then `--runs` times each way, and compares every byte. Needs PyTorch with
CUDA and nothing else. It knows PyTorch; it must never know Forebay: that is in the child's environment.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

GIB = 1 << 30
# The library's contexts on other GPUs take a while; until they are there copies are the driver's.
WARM_UP_S = 2.0


def child(runs: int) -> None:
    """Copies and prints GB/s of each run by direction, as JSON."""
    import torch

    source = torch.randint(0, 256, (GIB,), dtype=torch.uint8).pin_memory()
    target = torch.zeros(GIB, dtype=torch.uint8).pin_memory()
    device = torch.zeros(GIB, dtype=torch.uint8, device="cuda:0")
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_S:
        device.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
    rates: dict[str, list[float]] = {"h2d": [], "d2h": []}
    for _ in range(runs):
        for name, to, from_ in (("h2d", device, source), ("d2h", target, device)):
            if name == "h2d":
                device.zero_()
            else:
                target.zero_()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            to.copy_(from_, non_blocking=True)
            torch.cuda.synchronize()
            rates[name].append(GIB / 1e9 / (time.perf_counter() - begin))
        if not torch.equal(source, target):
            raise SystemExit("wrong bytes")
    print(json.dumps({"rates": rates, "torch": torch.__version__}))


def measured(arguments: argparse.Namespace, preload: Path | None) -> dict[str, object]:
    """What a child says."""
    environment = dict(os.environ)
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
        environment["FOREBAY_PRELOAD"] = "stats"
    command = [sys.executable, __file__, "--child", "--runs", str(arguments.runs)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return said


def main() -> None:
    """Measures, prints, and writes rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preload", type=Path, help="libforebay_preload.so, libforebay_cuda.so beside it")
    parser.add_argument("--runs", type=int, default=9, help="copies each way in a child")
    parser.add_argument("--rounds", type=int, default=2, help="children with and without the library")
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.runs)
    if arguments.preload is None or not arguments.preload.is_file():
        parser.error("--preload: names no file")
    with_library: dict[str, list[float]] = {"h2d": [], "d2h": []}
    without: dict[str, list[float]] = {"h2d": [], "d2h": []}
    version = ""
    for _ in range(arguments.rounds):
        for preload, rates in ((arguments.preload, with_library), (None, without)):
            said = measured(arguments, preload)
            version = str(said["torch"])
            for name, values in dict(said["rates"]).items():  # type: ignore[call-overload]
                rates[name] += values
    rows = [
        {
            "name": f"copy.{name}.preload.1gib",
            "unit": "GB/s",
            "value": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "runs": len(values),
            "peer": {"name": "PyTorch alone", "version": version, "value": statistics.median(without[name])},
        }
        for name, values in with_library.items()
    ]
    for row in rows:
        print(row)
    if arguments.json:
        arguments.json.write_text(json.dumps({"bench": "copy_preload", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
