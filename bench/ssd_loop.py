#!/usr/bin/env python3
"""The SSD tier on devices that are faster than this machine's disk, and what the load-or-compute gate does.

    bench/ssd_loop.py [--devices 1,2,4] [--json FILE]      # as root

A device is a loop device over a file in memory, with direct I/O and a file system of its own. `forebay bench
disk` measures the tier on one of them, and spread over several, in turn with raw io_uring on the same files.
The gate (`forebay.Slack`) is then asked at the measured rates. All that was made is undone at the end. Knows
loop devices and mounts; touches no device but those that it made.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm_engine
from ssd_figures import GB, GIB, KIB, RESULTS, Forebay, Row, in_gb_per_s
from ssd_formulas import Costs, profile

MEMORY = Path("/dev/shm")
SIZES = ("80kib", "1mib")
UNMOUNT_LIMIT_S = 20.0
# A log and the ceiling's room take as much each, and the log's segments and the file system some
# more.
OVERHEAD, SPARE_BYTES = 2.4, 768 << 20
CHUNK_TOKENS = 64
PROFILES = {"h200-llama-3.1-8b": 32, "h20-qwen3-coder-30b-a3b": 48}  # With their layers.
# An NVMe SSD and the paper's two, for comparison. In GB/s.
ASSUMED = {"an NVMe SSD": 7.0, "the paper's two SSDs": 25.9}
ASKED_TOKENS = (8 * KIB, 32 * KIB, 64 * KIB)


def why_not(device_bytes: int) -> str | None:
    """Why no devices can be made here, if so."""
    missing = [name for name in ("losetup", "mkfs.ext4", "mount") if not shutil.which(name)]
    if os.geteuid() != 0:
        return "loop devices are made by root"
    if missing:
        return f"{', '.join(missing)}: not installed"
    if not Path("/dev/loop-control").exists():
        return "the kernel has no loop devices"
    if shutil.disk_usage(MEMORY).free < device_bytes or available_bytes() < device_bytes + 2 * GIB:
        return f"{device_bytes / GIB:.1f} GiB of memory for the devices are not there"
    return None


def available_bytes() -> int:
    """Memory that can be used without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return int(kib) * KIB


def said(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def devices(count: int, each_bytes: int) -> Iterator[list[Path]]:
    """So many mounted devices. Nothing of them is left, whatever happens meanwhile."""
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=MEMORY, prefix="ssd-loop-")))
        yield [device(undo, folder / str(number), each_bytes) for number in range(count)]


def device(undo: contextlib.ExitStack, folder: Path, size: int) -> Path:
    """A loop device over a file of that size in memory. Returns where it is mounted."""
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir(parents=True)
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    loop = said("losetup", "--find", "--show", "--direct-io=on", image)
    undo.callback(said, "losetup", "--detach", loop)
    # Another program could have taken the number between two commands of ours.
    if said("losetup", "--noheadings", "--output", "BACK-FILE", loop) != str(image):
        raise RuntimeError(f"{loop} is not the device of {image}")
    said("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", loop)
    said("mount", loop, mounted)
    undo.callback(unmount, mounted)
    return mounted


def unmount(mounted: Path) -> None:
    """Unmounts. The kernel lets go of the files of a ring a moment after its process has ended."""
    end = time.monotonic() + UNMOUNT_LIMIT_S
    while subprocess.run(["umount", mounted], capture_output=True).returncode != 0:
        if time.monotonic() > end:
            said("umount", mounted)  # Says why not.
            return
        time.sleep(0.1)


def measured(forebay: Forebay, count: int, runs: int, run_mib: int) -> list[Row]:
    """The tier on so many devices."""
    each = int(OVERHEAD * runs * run_mib / count) * (1 << 20) + SPARE_BYTES
    if reason := why_not(count * each):
        sys.exit(f"SKIPPED: {reason}")
    options = ["--sizes", ",".join(SIZES), "--runs", str(runs), "--run-mib", str(run_mib)]
    with devices(count, each) as folders:
        places = [word for folder in folders for word in ("--dir", str(folder))]
        measured = forebay.json("bench", "disk", *places, *options, "--recovery-chunks", "1000")
    found = {row["name"]: row for row in measured["rows"]}
    device = f"{count} loop device{'s' if count > 1 else ''} over memory"
    how = f"bench/ssd_loop.py --devices {count} --runs {runs} --run-mib {run_mib}"
    rows = []
    for size in SIZES:
        for verb in ("retrieve", "store"):
            row = found[f"disk.{verb}.{size}"]
            rows.append(in_gb_per_s(f"ssd.loop.{count}.{verb}.{size}", row, device, how))
        for side in ("", "raw."):
            row = found[f"disk.{side}cpu_us.{size}"]
            about = {"name": f"ssd.loop.{count}.{side}cpu_us.{size}", "device": device, "how": how}
            rows.append(row | about)
    return rows


def gate(name: str, layers: int, gb_per_s: float) -> Any:
    """The gate of an engine that computes as the profile says, and has measured its disk at that rate."""
    from forebay import Slack

    costs = profile(name)
    grid = [(new, prefix) for new in (64, 512, 2048, 8192) for prefix in (0, 8192, 32768, 131072)]
    steps = [
        {"new_tokens": new, "prefix_tokens": prefix, "seconds": costs.prefill_s(new, prefix)}
        for new, prefix in grid
    ]
    tiers = {"disk": {"bytes_per_s": gb_per_s * GB}}
    return Slack(layers, json.dumps({"version": 1, "layers": layers, "steps": steps, "tiers": tiers}))


def loads(name: str, layers: int, gb_per_s: float, tokens: int) -> bool:
    """Whether the gate loads a prefix of that length, behind which one more chunk is to be computed."""
    chunks = tokens // CHUNK_TOKENS
    # A new one for each question: one in 16 answers loads a little only to learn.
    worth: int = gate(name, layers, gb_per_s).worth(
        prompt_tokens=tokens + CHUNK_TOKENS,
        held_tokens=0,
        chunk_tokens=CHUNK_TOKENS,
        chunk_bytes=CHUNK_TOKENS * profile(name).token_bytes,
        in_memory=0,
        on_disk=chunks,
        on_peers=0,
    )
    return worth == chunks


def decided_tokens(name: str, layers: int, gb_per_s: float) -> int:
    """The shortest prefix that the gate loads, in whole chunks."""
    below, loaded = 0, 1
    while not loads(name, layers, gb_per_s, loaded * CHUNK_TOKENS):
        below, loaded = loaded, 2 * loaded
    while loaded - below > 1:
        middle = (below + loaded) // 2
        if loads(name, layers, gb_per_s, middle * CHUNK_TOKENS):
            loaded = middle
        else:
            below = middle
    return loaded * CHUNK_TOKENS


def gate_rows(rates: dict[str, float]) -> list[Row]:
    """From which length on each model's gate loads, predicted and decided, and both times of some lengths."""
    rows = []
    for number, (rate_of, gb_per_s) in enumerate(rates.items()):
        for name, layers in PROFILES.items():
            costs: Costs = profile(name)
            asked = {
                f"{tokens // KIB}k": {
                    "load_s": costs.load_s(tokens, gb_per_s * GB),
                    "compute_s": costs.prefill_s(tokens, 0),
                    "loads": loads(name, layers, gb_per_s, tokens),
                }
                for tokens in ASKED_TOKENS
            }
            row = vllm_engine.row(
                f"ssd.gate.{number}.{name}", "tokens", [decided_tokens(name, layers, gb_per_s)],
                predicted=costs.worth_loading_tokens(gb_per_s * GB), rate_of=rate_of, gb_per_s=gb_per_s,
                model=name, asked=asked, device="none: decided at that rate", how="bench/ssd_loop.py",
            )  # fmt: skip
            rows.append(row)
    return rows


def disk_rate() -> dict[str, float]:
    """The rate of this machine's disk, where it was measured."""
    file = RESULTS / "ssd-contexts.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    rates = {row["name"]: row["value"] for row in rows}
    name = "ssd.context.disk.retrieve.8k"
    return {"the virtual disk": rates[name]} if name in rates else {}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="1,2,4", help="numbers of devices, each measured by itself")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--run-mib", type=int, default=256, help="that a run moves")
    parser.add_argument("--json", type=Path, default=RESULTS / "ssd-loop.json", help="where the results go")
    parser.add_argument("--forebay", help="the program")
    args = parser.parse_args()
    # A checkout has the extension only if it was built there: an installed package comes first.
    sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))
    # What was made is undone on this signal, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    forebay, rows = Forebay(vllm_engine.program(args.forebay)), []
    for count in map(int, args.devices.split(",")):
        rows += measured(forebay, count, args.runs, args.run_mib)
    rates = disk_rate()
    rates |= {row["device"]: row["value"] for row in rows if row["name"].endswith("retrieve.1mib")}
    rows += gate_rows(rates | ASSUMED)
    results = vllm_engine.results("ssd-loop", [], "loop devices over memory", rows)
    args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
