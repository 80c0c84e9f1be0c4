#!/usr/bin/env python3
"""Writes the tables of docs/ssd-figures.md: `bench/ssd_page.py`.

Each section of the page that is named here has one table, which is made of the files in bench/results. The
text around them is the page's own. Knows rows and tables, and measures nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/ssd-figures.md"
RESULTS = ROOT / "bench/results"
FILES = ("ssd-figures", "ssd-contexts", "ssd-loop", "vllm-crossover-h200")
MISSING = "not measured"
LENGTHS = ("8k", "32k", "128k")
MODELS = {"h200-llama-3.1-8b": "8B, H200 or H100", "h20-qwen3-coder-30b-a3b": "30B-A3B, H20"}

Rows = dict[str, dict[str, Any]]
Line = list[str]


def read(folder: Path = RESULTS) -> Rows:
    """All rows there are, by name."""
    files = [folder / f"{name}.json" for name in FILES]
    found = [json.loads(file.read_text())["rows"] for file in files if file.exists()]
    return {row["name"]: row for rows in found for row in rows}


def table(head: Line, lines: list[Line]) -> str:
    """Markdown of a table."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def value(rows: Rows, name: str, form: str = ".1f") -> str:
    """A figure, or that there is none."""
    return f"{rows[name]['value']:{form}}" if name in rows else MISSING


def beside(rows: Rows, name: str) -> str:
    """A rate, its spread, and its part of the ceiling."""
    if name not in rows:
        return MISSING
    row = rows[name]
    return f"{spread(row, '.2f')}; {row['ratio']:.2f}"


def hits(rows: Rows) -> str:
    """Table 1 of the paper."""
    tiers = {
        "HBM": ("hbm", "60 GiB"),
        "HBM and DRAM": ("dram", "and 256 GB"),
        "HBM, DRAM and SSD": ("ssd", "and 14 TB"),
        "HBM and SSD": ("hbm_ssd", "60 GiB and 14 TB"),
    }
    traces = ("conversation", "synthetic", "weka")
    lines = []
    for name, (tier, size) in tiers.items():
        paper = rows[f"ssd.hits.{traces[0]}.{tier}"].get("paper")
        theirs = f"{paper['leval']} %, {paper['loogle']} %" if paper else ""
        lines.append([name, size, theirs, *(value(rows, f"ssd.hits.{one}.{tier}") + " %" for one in traces)])
    most = [f"{rows[f'ssd.hits.{one}.hbm']['ceiling']:.1f} %" for one in traces]
    head = ["tiers", "size", "paper: LEval, LooGLE", *(f"ours: {one}" for one in traces)]
    return table(head, [*lines, ["without limit", "", "", *most]])


def contexts(rows: Rows) -> str:
    """Figure 9: rates by length of the prompt."""
    lines = []
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        names = [
            f"ssd.context.{tier}.{verb}.{tokens}k"
            for tier in ("disk", "memory")
            for verb in ("retrieve", "store")
        ]
        lines.append([f"{tokens}k", *(beside(rows, name) for name in names)])
    return table(["tokens", "from disk", "to disk", "from memory", "to memory"], lines)


def addresses(rows: Rows) -> str:
    """Figure 10: bytes of addresses."""
    names = {
        "PRP, a list of 64 KiB for each command of 1 MiB": "prp.lists",
        "PRP, 8 bytes for each page of 4 KiB": "prp",
        "SGL, 16 bytes for each piece of 64 KiB": "sgl",
    }
    lines = []
    for text, name in names.items():
        row = rows[f"ssd.addresses.{name}"]
        theirs = f"{row['paper']:,.0f} MiB" if "paper" in row else ""
        lines.append([text, theirs, f"{row['value']:,.0f} MiB"])
    encode = [row for name, row in rows.items() if "encode_ns" in name]
    lines += [
        [f"making them: {how_made(row['name'])}", "", f"{row['value']:.0f} ns per MiB"] for row in encode
    ]
    if not encode:
        lines.append(["making them, per MiB of KV", "", MISSING])
    return table(["addresses of 60 GiB of KV", "paper", "ours"], lines)


def how_made(name: str) -> str:
    """What a row of `forebay bench nvme` encodes, and when."""
    kind, how = name.removeprefix("ssd.nvme.").split(".encode_ns.")
    times = {"each_time": "each command", "built_once": "a region once", "sliced": "slices of that"}
    return f"{kind.upper()} {times[how]}"


def crossovers(rows: Rows) -> str:
    """Figure 13: the share that loading may have."""
    rates = ("2.2", "3.5", "7", "12.4", "25.9", "55", "110")
    lines = []
    for profile, text in MODELS.items():
        for tokens in LENGTHS:
            names = [f"ssd.crossover.{profile}.{tokens}.{rate}" for rate in rates]
            lines.append([text, tokens, *(value(rows, name) for name in names)])
    return table(["model and GPU", "prompt", *(f"{rate} GB/s" for rate in rates)], lines)


def shares(rows: Rows) -> str:
    """Figure 11: time to the first token by the share that is loaded, and what the step waits."""
    lines = []
    for tokens in LENGTHS:
        name = f"vllm.share.ttft_s.{tokens}."
        cold = rows.get(f"vllm.share.recompute_s.{tokens}")
        if cold is None:
            lines.append([tokens, *[MISSING] * 6])
            continue
        lines.append([tokens, "0", spread(cold, ".2f"), f"{cold['value']:.2f}", "", "", "computed"])
        for prefix, row in sorted(by_number(rows, name).items()):
            bubble = rows.get(f"vllm.bubble_ms.{tokens}.{prefix}")
            waits = [spread(bubble, ".0f"), f"{bubble['ceiling']:.0f}"] if bubble else ["", ""]
            how = "layer by layer" if row["layerwise"] else "before the step"
            computing = f"{row['computing_s']:.2f}"
            lines.append([tokens, f"{100 * row['share']:.1f}", spread(row, ".2f"), computing, *waits, how])
    head = ["prompt", "loaded, %", "TTFT, s", "computing alone, s", "the step waits, ms"]
    return table([*head, "first layer, ms", "how it comes"], lines)


def measured_crossovers(rows: Rows) -> str:
    """Figure 13: the share behind which the step waits, beside the formula's."""
    lines = []
    for tokens in LENGTHS:
        rate, found = rows.get(f"vllm.share.load_gbps.{tokens}"), rows.get(f"vllm.crossover.{tokens}")
        rates = [f"{rate['value']:.2f}", f"{rate['ceiling']:.2f}"] if rate else [MISSING] * 2
        points = [f"{found['predicted']:.1f}", f"{found['value']:.1f}"] if found else [MISSING] * 2
        lines.append([tokens, *rates, *points])
    return table(["prompt", "loads, GB/s", "plain reads, GB/s", "predicted, %", "measured, %"], lines)


def by_number(rows: Rows, name: str) -> dict[int, dict[str, Any]]:
    """The rows whose names go on with a number behind that."""
    found = {key.removeprefix(name): row for key, row in rows.items() if key.startswith(name)}
    return {int(key): row for key, row in found.items() if key.isdigit()}


def spread(row: dict[str, Any], form: str) -> str:
    """A figure, and its spread if it was measured more than once."""
    around = f" ({row['min']:{form}} to {row['max']:{form}})" if row["runs"] > 1 else ""
    return f"{row['value']:{form}}{around}"


def worth(rows: Rows) -> str:
    """From which length on loading takes less time than computing."""
    rates = ("2.2", "3.5", "7")
    lines = [
        [text, *(value(rows, f"ssd.worth.{profile}.{rate}", ",.0f") for rate in rates)]
        for profile, text in MODELS.items()
    ]
    return table(["model and GPU", *(f"{rate} GB/s" for rate in rates)], lines)


def costs(rows: Rows) -> str:
    """Figure 14: dollars for a million tokens of prompts."""
    tiers = {
        "all computed": "computed",
        "HBM": "hbm",
        "HBM and DRAM": "dram",
        "HBM, DRAM and SSD": "ssd",
        "HBM and SSD": "hbm_ssd",
    }
    traces = ("conversation", "synthetic")
    lines = []
    for text, tier in tiers.items():
        line = [text]
        for trace in traces:
            row = rows[f"ssd.cost.{trace}.{tier}"]
            line.append(f"{row['value']:.4f} ({row['parts']['gpu']:.4f} + {row['parts']['tiers']:.4f})")
        lines.append(line)
    return table(["tiers", *traces], lines)


def loops(rows: Rows) -> str:
    """Loop devices over memory: rates, and CPU beside raw io_uring."""
    lines = []
    for count in (1, 2, 4):
        cpu, raw = (rows.get(f"ssd.loop.{count}.{name}cpu_us.80kib") for name in ("", "raw."))
        names = [
            f"ssd.loop.{count}.{verb}.{size}" for size in ("80kib", "1mib") for verb in ("retrieve", "store")
        ]
        us = (
            f"{cpu['value']:.1f} / {raw['value']:.1f} ({cpu['value'] / raw['value']:.1f})"
            if cpu and raw
            else MISSING
        )
        lines.append([str(count), *(beside(rows, name) for name in names), us])
    head = ["devices", "retrieve 80 KiB", "store 80 KiB", "retrieve 1 MiB", "store 1 MiB"]
    return table([*head, "CPU us per 80 KiB: ours / raw"], lines)


def gates(rows: Rows) -> str:
    """From which length on the load-or-compute gate loads, and what it does with some lengths."""
    lines = []
    asked = ("8k", "32k", "64k")
    for row in (row for name, row in rows.items() if name.startswith("ssd.gate.")):
        line = [f"{row['rate_of']}, {row['gb_per_s']:.2f}", MODELS[row["model"]]]
        line.append(f"{row['predicted']:,.0f} / {row['value']:,.0f}")
        for times in (row["asked"][tokens] for tokens in asked):
            does = "loads" if times["loads"] else "computes"
            line.append(f"{times['load_s']:.2f} / {times['compute_s']:.2f}: {does}")
        lines.append(line)
    empty = [["loop devices over memory", *[MISSING] * (2 + len(asked))]]
    head = ["rate of, GB/s", "model and GPU", "tokens from which it loads: predicted / decided"]
    return table([*head, *(f"{tokens}: load / compute, s" for tokens in asked)], lines or empty)


SECTIONS: dict[str, Callable[[Rows], str]] = {
    "Hits by tier": hits,
    "Rates by length of the prompt": contexts,
    "Bytes of addresses": addresses,
    "How much may be loaded": crossovers,
    "Where waiting begins": measured_crossovers,
    "Time to the first token": shares,
    "When a whole prefix is loaded": worth,
    "Cost of a million tokens": costs,
    "Faster devices": loops,
    "What the gate decides": gates,
}


def written(page: str, rows: Rows) -> str:
    """The page with its tables anew. A section without a table is an error of the page."""
    lines, found = page.split("\n"), []
    section, left = None, set(SECTIONS)
    for number, line in enumerate(lines):
        if line.startswith("#"):
            section = line.lstrip("# ")
        is_table = line.startswith("|")
        if is_table and section in left:
            left.remove(section)
            found.append(SECTIONS[section](rows))
        elif not (is_table and section in SECTIONS and lines[number - 1].startswith("|")):
            found.append(line)
    if left:
        raise ValueError(f"sections without a table: {sorted(left)}")
    return "\n".join(found)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), read()))
