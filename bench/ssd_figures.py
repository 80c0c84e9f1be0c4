#!/usr/bin/env python3
"""The figures of docs/ssd-figures.md: those of the Tutti paper (arXiv 2605.03375), and ours beside them.

    FOREBAY_TRACES=FOLDER bench/ssd_figures.py counted     # bench/results/ssd-figures.json
    bench/ssd_figures.py contexts --dir FOLDER             # bench/results/ssd-contexts.json
    bench/ssd_page.py                                      # the tables of the page

`counted` is the same on every machine: hits of traces by tier, bytes of addresses, crossovers, cost.
`contexts` measures: KV of prompts of 1k to 128k tokens to and from the disk of the folder, and host memory.
A row says what it was measured on (`device`), and by which command (`how`). Knows which figures there are;
the program `forebay` counts hits, computes costs and measures.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import vllm_engine
from ssd_formulas import Costs, profile, prp_bytes, prp_list_bytes, sgl_bytes

RESULTS = Path(__file__).parent / "results"
ENCODE = RESULTS / "nvme-2cpu.json"  # Of `forebay bench nvme`.
KIB, GIB, GB = 1 << 10, 1 << 30, 10**9
NO_DEVICE = "none: counted"
COMMAND = "bench/ssd_figures.py"

TRACES = {
    "conversation": "mooncake-fast25/conversation_trace.jsonl",
    "synthetic": "mooncake-fast25/synthetic_trace.jsonl",
    "weka": "weka-claude-code",
}
# The sessions of the other one are a sample, spread over five days: no load for a GPU.
COST_TRACES = ("conversation", "synthetic")
# The paper gives each H100 256 GB of DRAM and 14 TB of SSD. 60 GiB is its own example of KV in 80
# GB of HBM.
HBM, DRAM, SSD = 60 * GIB, 256 * GB, 14_000 * GB
# As the paper has them, for an hour.
GPU_HOUR, DRAM_GB_HOUR, SSD_GB_HOUR = 5.0, 0.0088, 0.000082

CROSSOVER_PROFILES = ("h200-llama-3.1-8b", "h20-qwen3-coder-30b-a3b")
CROSSOVER_TOKENS = (8 * KIB, 32 * KIB, 128 * KIB)
# A virtual disk twice, an SSD, the paper's GPUDirect Storage and its own two SSDs, a PCIe 5.0 link,
# two.
CROSSOVER_RATES = (2.2, 3.5, 7.0, 12.4, 25.9, 55.0, 110.0)

TOKEN_BYTES = 128 * KIB
CHUNK_LAYER_BYTES = 256 * KIB  # 64 tokens in one of 32 layers.
# Tokens and runs: a run of the disk takes four times its KV on the disk, one of memory nine times
# in memory.
DISK_CONTEXTS = {1: 5, 2: 5, 4: 5, 8: 3, 16: 3, 32: 2, 64: 1, 128: 1}
MEMORY_CONTEXTS = {1: 5, 2: 5, 4: 5, 8: 3}

Row = dict[str, Any]


class Forebay:
    """The program."""

    def __init__(self, path: str) -> None:
        self.path = path

    def json(self, *arguments: str) -> dict[str, Any]:
        """What a command writes with `--json`."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "said.json"
            command = [self.path, *arguments, "--json", str(file)]
            print(f"$ forebay {' '.join(arguments)}", flush=True)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            said: dict[str, Any] = json.loads(file.read_text())
            return said


def row(name: str, unit: str, value: float, **more: Any) -> Row:
    """A figure that was counted or predicted."""
    return vllm_engine.row(name, unit, [value], device=NO_DEVICE, how=f"{COMMAND} counted", **more)


def tier_hits(forebay: Forebay, trace: str, folder: Path) -> dict[str, float]:
    """Shares of a trace's blocks that are found, by the tiers there are, and what the cost needs to know."""
    tiers = [f"memory={HBM}B,ssd={SSD}B", f"memory={HBM + DRAM}B,ssd={SSD}B"]
    said = forebay.json("trace", "info", str(folder / TRACES[trace]), "--tiers", *tiers, "--admission", "all")
    hbm, both = said["tiers"]["rows"]
    return {
        "hbm": hbm["memory_hits"],
        "dram": both["memory_hits"],
        "ssd": both["memory_hits"] + both["ssd_hits"],
        "hbm_ssd": hbm["memory_hits"] + hbm["ssd_hits"],
        "no_limit": said["prefix"]["max_hit_blocks"],
        "tokens": said["requests"] * said["input_tokens"]["mean"],
        "hours": said["span_s"] / 3600,
    }


def hit_rows(trace: str, hits: dict[str, float]) -> list[Row]:
    """A trace's hits by tier; tiers are as large as the paper's."""
    capacity = {
        "hbm": {"hbm": HBM},
        "dram": {"hbm": HBM, "dram": DRAM},
        "ssd": {"hbm": HBM, "dram": DRAM, "ssd": SSD},
        "hbm_ssd": {"hbm": HBM, "ssd": SSD},
    }
    paper = {"hbm": [8, 4], "dram": [53, 24], "ssd": [84, 86]}
    found = []
    for tier, sizes in capacity.items():
        ratio = hits[tier] / hits["no_limit"]
        more: Row = {"ceiling": 100 * hits["no_limit"], "ratio": ratio, "capacity_bytes": sizes}
        if tier in paper:
            more["paper"] = dict(zip(["leval", "loogle"], paper[tier], strict=True))
        found.append(row(f"ssd.hits.{trace}.{tier}", "%", 100 * hits[tier], **more))
    return found


def address_rows() -> list[Row]:
    """Bytes that say where 60 GiB of KV lie, and what making them takes, where that was measured."""
    mib = 1 << 20
    rows = [
        row("ssd.addresses.prp.lists", "MiB", prp_list_bytes(60 * GIB, mib, 64 * KIB) / mib, paper=3840),
        row("ssd.addresses.prp", "MiB", prp_bytes(60 * GIB) / mib),
        row("ssd.addresses.sgl", "MiB", sgl_bytes(60 * GIB, 64 * KIB) / mib, paper=15),
    ]
    if ENCODE.exists():
        measured = json.loads(ENCODE.read_text())
        about = {"device": "CPU", "how": "forebay bench nvme", "file": ENCODE.name}
        encode = [one for one in measured["rows"] if "encode_ns" in one["name"]]
        rows += [one | {"name": f"ssd.{one['name']}"} | about for one in encode]
    return rows


def crossover_rows() -> list[Row]:
    """The share of a prompt that may come from a disk while the rest is computed, by length and rate."""
    rows = []
    for name in CROSSOVER_PROFILES:
        costs: Costs = profile(name)
        for tokens in CROSSOVER_TOKENS:
            for rate in CROSSOVER_RATES:
                share = 100 * costs.crossover(tokens, rate * GB)
                rows.append(row(f"ssd.crossover.{name}.{tokens // KIB}k.{rate:g}", "%", share))
        rows += [worth_row(name, costs, rate) for rate in CROSSOVER_RATES[:3]]
    return rows


def worth_row(name: str, costs: Costs, rate: float) -> Row:
    """From which length on a whole prefix is loaded sooner than computed."""
    return row(f"ssd.worth.{name}.{rate:g}", "tokens", costs.worth_loading_tokens(rate * GB))


def cost_rows(forebay: Forebay, trace: str, hits: dict[str, float]) -> list[Row]:
    """What a million tokens of prompts cost by the tiers there are, at the paper's prices.

    `forebay report` says what computing them would cost, what hits save of that, and what tiers cost. HBM
    comes with the GPU. GPUs cost only while they compute.
    """
    tokens, hbm = hits["tokens"], hits["hbm"]
    kept = {
        "computed": ({}, 0, 0),
        "hbm": ({"gpu": hbm}, 0, 0),
        "dram": ({"gpu": hbm, "memory": hits["dram"] - hbm}, DRAM, 0),
        "ssd": ({"gpu": hbm, "memory": hits["dram"] - hbm, "ssd": hits["ssd"] - hits["dram"]}, DRAM, SSD),
        "hbm_ssd": ({"gpu": hbm, "ssd": hits["hbm_ssd"] - hbm}, 0, SSD),
    }
    computed = report(forebay, {"gpu": tokens}, 0, 0, hits["hours"])["worth"]
    rows = []
    for name, (shares, memory, ssd) in kept.items():
        saved = {tier: share * tokens for tier, share in shares.items()}
        said = report(forebay, saved, memory, ssd, hits["hours"])
        price = computed - said["worth"] + said["tiers"]
        figure = price / tokens * 1e6
        parts = {"gpu": (computed - said["worth"]) / tokens * 1e6, "tiers": said["tiers"] / tokens * 1e6}
        rows.append(row(f"ssd.cost.{trace}.{name}", "$ per 1M tokens", figure, parts=parts))
    return rows


def report(
    forebay: Forebay, tokens: dict[str, float], memory: int, ssd: int, hours: float
) -> dict[str, float]:
    """What `forebay report` says of a page of metrics with so many saved tokens and such tiers."""
    with tempfile.TemporaryDirectory() as folder:
        engine, node = Path(folder) / "engine.txt", Path(folder) / "node.txt"
        series = 'forebay_external_prefix_cache_hits_total{{model_name="8b",tier="{}"}} {}\n'
        # A page without a series is an error, and a counter of 0 saves nothing.
        engine.write_text("".join(series.format(*one) for one in (tokens or {"gpu": 0}).items()))
        node.write_text(f"forebay_memory_capacity_bytes {memory}\nforebay_disk_capacity_bytes {ssd}\n")
        pages = ["--engine", str(engine), "--node", str(node), "--hours", str(hours)]
        dram, ssd_price = (price * GIB / GB for price in (DRAM_GB_HOUR, SSD_GB_HOUR))
        prices = ["--gpu-price", f"{GPU_HOUR}/hour", "--memory-price", f"{dram}/GiB-hour"]
        prices += ["--ssd-price", f"{ssd_price}/GiB-hour"]
        said = forebay.json("report", *pages, "--profile", "h100-llama-3.1-8b", *prices)
    worth = sum(one["worth"] for one in said["rows"])
    return {"worth": worth, "tiers": said["memory_cost"] + said["ssd_cost"]}


def counted(forebay: Forebay, traces: Path) -> list[Row]:
    """All that needs no device."""
    rows = address_rows() + crossover_rows()
    for trace in TRACES:
        hits = tier_hits(forebay, trace, traces)
        rows += hit_rows(trace, hits)
        if trace in COST_TRACES:
            rows += cost_rows(forebay, trace, hits)
    return rows


def contexts(forebay: Forebay, folder: Path, longest: int) -> list[Row]:
    """KV of prompts of more and more tokens: to and from the disk, and host memory by way of a node."""
    rows = []
    for tokens, runs in up_to(longest, DISK_CONTEXTS):
        mib = tokens * KIB * TOKEN_BYTES >> 20
        arguments = ["--sizes", "1mib", "--runs", str(runs), "--run-mib", str(mib)]
        command = ["bench", "disk", "--dir", str(folder), *arguments, "--recovery-chunks", "1000"]
        said = {one["name"]: one for one in forebay.json(*command)["rows"]}
        for verb in ("retrieve", "store"):
            one = said[f"disk.{verb}.1mib"]
            how = f"forebay bench disk --dir DIR {' '.join(arguments)}"
            rows.append(in_gb_per_s(f"ssd.context.disk.{verb}.{tokens}k", one, "the virtual disk", how))
    for tokens, runs in up_to(longest, MEMORY_CONTEXTS):
        arguments = ["--tokens", str(tokens * KIB), "--layer-bytes", str(CHUNK_LAYER_BYTES)]
        arguments += ["--runs", str(runs)]
        measured = forebay.json("bench", "node", "--dir", str(folder), *arguments)
        said = {one["name"]: one for one in measured["rows"]}
        how = f"forebay bench node --dir DIR {' '.join(arguments)}"
        for verb, name in (("retrieve", "load"), ("store", "store")):
            one = rate_of(said[f"node.{name}.{tokens}k.ms"], tokens * KIB * TOKEN_BYTES)
            rows.append(in_gb_per_s(f"ssd.context.memory.{verb}.{tokens}k", one, "host memory", how))
    return rows


def up_to(longest: int, runs: dict[int, int]) -> list[tuple[int, int]]:
    """The lengths, in thousands of tokens, that are not above that, with their runs."""
    return [one for one in runs.items() if one[0] <= longest]


def rate_of(time: Row, moved_bytes: int) -> Row:
    """A row of milliseconds as one of MiB/s; the slowest run is the smallest rate."""
    mib_per_s = {key: moved_bytes / (1 << 20) / time[key] * 1e3 for key in ("value", "ceiling")}
    spread = {"min": time["max"], "max": time["min"]}
    mib_per_s |= {key: moved_bytes / (1 << 20) / ms * 1e3 for key, ms in spread.items()}
    return mib_per_s | {"runs": time["runs"], "ratio": mib_per_s["value"] / mib_per_s["ceiling"]}


def in_gb_per_s(name: str, one: Row, device: str, how: str) -> Row:
    """A row of MiB/s in the paper's unit, with the machine's load when it was measured."""
    rates = {key: one[key] * (1 << 20) / GB for key in ("value", "min", "max", "ceiling")}
    same = {key: one[key] for key in ("runs", "ratio", "cpu_s_per_gb") if key in one}
    about = {"device": device, "how": how, "load_average": round(os.getloadavg()[0], 1)}
    return {"name": name, "unit": "GB/s"} | rates | same | about


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=["counted", "contexts"])
    parser.add_argument("--dir", type=Path, help="on the disk that `contexts` measures")
    parser.add_argument("--longest", type=int, default=128, help="prompt of `contexts`, in k tokens")
    parser.add_argument("--disk", default="virtual", help="its name, for the results")
    parser.add_argument("--json", type=Path, help="where the results go (default: bench/results)")
    parser.add_argument("--forebay", help="the program")
    args = parser.parse_args()
    forebay, traces = Forebay(vllm_engine.program(args.forebay)), os.environ.get("FOREBAY_TRACES")
    if args.which == "counted":
        if not traces:
            sys.exit("$FOREBAY_TRACES names no folder with the public traces")
        name, disk, rows = "ssd-figures", None, counted(forebay, Path(traces))
    else:
        if not args.dir:
            sys.exit("--dir is missing: a folder on the disk that is measured")
        name, disk, rows = "ssd-contexts", args.disk, contexts(forebay, args.dir, args.longest)
    said = vllm_engine.results(name, [], disk, rows)
    (args.json or RESULTS / f"{name}.json").write_text(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    main()
