#!/usr/bin/env python3
"""How often a session's KV has left memory when the session comes back, and what saying `prefetch` gains.

    FOREBAY_TRACES=FOLDER FOREBAY=PROGRAM bench/session_gaps.py [--json FILE]

Replays recorded Claude Code sessions against a memory tier that drops what was used longest ago, over an SSD
tier that holds all of it. Rates are those that bench/session_prefetch.py measured, and assumed ones. Each
turn whose session was there before is a return: its KV is what it has in common with prompts before it. With
`prefetch` the node is told some seconds before each return, and not before the turn before has ended; or as
long before as the vLLM connector does that knows the time, which is longer for a longer session.
Knows the trace format of `forebay trace sample`. Not modelled: other work for the SSD, answers until they are
part of a prompt, and the time that a change of the load takes from or gives to what follows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RATES_OF = "session-prefetch-2cpu"
TRACE = "weka-claude-code"
TOKEN_BYTES = 128 << 10  # Llama 3 8B in bfloat16.
MEMORY_GIB = (64, 128, 256)
# Seconds, of the blocks of a prompt and those that the SSD reads in a second; None is without
# `prefetch`.
Lead = Callable[[int, float], float]
LEADS: dict[str, Lead | None] = {
    "none": None,
    "2s": lambda *_: 2.0,
    "10s": lambda *_: 10.0,
    "30s": lambda *_: 30.0,
    # As `Hints.ahead_s` of the connector.
    "needed": lambda blocks, per_s: min(max(2.0, 1.25 * blocks / per_s), 30.0),
}
SPREADS_S = (3600, 8 * 3600)
# An NVMe SSD, and the link of a GPU. In GB/s.
ASSUMED = {"memory": 55.0, "ssd": 7.0}
PERCENTILES = (10, 25, 50, 75, 90, 99)
GIB, GB = 1 << 30, 10**9


@dataclass(frozen=True)
class Turn:
    """A request of a session."""

    session: str
    at_s: float
    gap_s: float | None  # Since the answer before; None for a session's first one.
    before: int  # Blocks of the prompt before.
    blocks: Sequence[int]


@dataclass(frozen=True)
class Return:
    """What a turn found that continues a session, in blocks."""

    in_memory: int
    on_ssd: int


class Memory:
    """Blocks in the order of their last use. What it drops is on the SSD, like all else."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: OrderedDict[int, None] = OrderedDict()

    def use(self, blocks: Sequence[int]) -> None:
        """A prompt is used from its end to its beginning, so that its end is dropped first."""
        for block in reversed(blocks):
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > self.room:
            self.held.popitem(last=False)

    def count(self, blocks: Iterable[int]) -> int:
        """How many of these it holds."""
        return sum(block in self.held for block in blocks)


def replay(
    turns: Iterable[Turn], room: int, lead: Lead | None, ssd_blocks_per_s: float
) -> list[tuple[Turn, Return]]:
    """What each return finds. With a lead, as many blocks come ahead of it as the SSD reads in that time."""
    ordered = sorted(turns, key=lambda turn: turn.at_s)
    events = [(turn.at_s, 1, turn) for turn in ordered]
    if lead is not None:
        for turn in ordered:
            if turn.gap_s is not None:
                ahead_s = min(lead(turn.before, ssd_blocks_per_s), turn.gap_s)
                events.append((turn.at_s - ahead_s, 0, turn))
    memory, stored, found = Memory(room), set[int](), []
    last: dict[str, Sequence[int]] = {}  # Of each session, the prompt before: what a platform can name.
    for at_s, is_turn, turn in sorted(events, key=lambda event: event[:2]):
        if not is_turn:
            # Nothing, if the turn before is recorded at the same time.
            named = last.get(turn.session, ())
            memory.use(coming(named, memory, int(ssd_blocks_per_s * (turn.at_s - at_s))))
            continue
        if turn.gap_s is not None:
            shared = prefix(turn.blocks, stored)
            in_memory = memory.count(shared)
            found.append((turn, Return(in_memory, len(shared) - in_memory)))
        memory.use(turn.blocks)
        stored.update(turn.blocks)
        last[turn.session] = turn.blocks
    return found


def prefix(blocks: Sequence[int], stored: set[int]) -> Sequence[int]:
    """The blocks up to the first that was never stored."""
    new = (at for at, block in enumerate(blocks) if block not in stored)
    return blocks[: next(new, len(blocks))]


def coming(blocks: Sequence[int], memory: Memory, most: int) -> Sequence[int]:
    """The blocks of a prompt up to where the SSD comes in that time: it reads only what memory lacks."""
    for at, block in enumerate(blocks):
        most -= block not in memory.held
        if most < 0:
            return blocks[:at]
    return blocks


def gaps(turns: Sequence[dict[str, Any]]) -> list[Turn]:
    """The turns of a trace as `forebay trace sample` writes it."""
    ended_us: dict[str, int] = {}
    before: dict[str, int] = {}
    found = []
    for turn in sorted(turns, key=lambda turn: (turn["session"], turn["turn"])):
        name, at_us = turn["session"], turn["arrival_us"]
        # A sub-agent may ask again before the recorded end of its answer before.
        gap_s = max(0, at_us - ended_us[name]) / 1e6 if name in ended_us else None
        found.append(Turn(name, at_us / 1e6, gap_s, before.get(name, 0), turn["blocks"]))
        before[name] = len(turn["blocks"])
        ended_us[name] = at_us + turn.get("service_us", 0)
    return found


def read(forebay: str, traces: Path, spread_s: int) -> tuple[list[Turn], int]:
    """The recorded sessions, whose starts are spread over that time, and the tokens of a block."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trace.jsonl"
        command = [forebay, "trace", "sample", str(traces / TRACE), "--spread-starts", str(spread_s)]
        subprocess.run([*command, "--seed", "1", "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
        with out.open() as lines:
            said = [json.loads(line) for line in lines]
    return gaps(said), said[0]["block_tokens"]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent are."""
    return sorted(values)[round(percent / 100 * (len(values) - 1))]


def row(name: str, unit: str, value: float, values: Sequence[float], **more: Any) -> dict[str, Any]:
    """A figure that was counted, with the smallest and largest of those that it is of."""
    spread = {"min": min(values), "max": max(values), "runs": len(values)}
    how = {"device": "none: counted", "how": "bench/session_gaps.py"}
    return {"name": name, "unit": unit, "value": value} | spread | how | more


def gap_rows(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """How long sessions pause."""
    pauses = [turn.gap_s for turn in turns if turn.gap_s is not None]
    return [
        row(f"hints.gap_s.p{percent}", "s", percentile(pauses, percent), pauses) for percent in PERCENTILES
    ]


def load_s(found: Return, rates: dict[str, float], block_bytes: int) -> float:
    """What loading takes: what memory has and what the SSD has, one after the other."""
    parts = found.in_memory / rates["memory"] + found.on_ssd / rates["ssd"]
    return parts * block_bytes / GB


def tier_rows(
    name: str, turns: Sequence[Turn], block_bytes: int, rates: dict[str, float], memory_gib: int
) -> list[dict[str, Any]]:
    """One memory, one pair of rates, with each lead: who finds KV on the SSD, and what loads take."""
    rows = []
    room, per_s = memory_gib * GIB // block_bytes, rates["ssd"] * GB / block_bytes
    for lead_name, lead in LEADS.items():
        found = [one for _, one in replay(turns, room, lead, per_s) if one.in_memory + one.on_ssd > 0]
        times = [load_s(one, rates, block_bytes) for one in found]
        away = [one for one in found if one.on_ssd]
        in_all = sum(one.in_memory + one.on_ssd for one in found)
        rows.append(
            row(
                f"hints.{name}.{memory_gib}gib.{lead_name}",
                "s",
                statistics.mean(times),
                times,
                p50=percentile(times, 50),
                p90=percentile(times, 90),
                p99=percentile(times, 99),
                on_ssd_percent=100 * len(away) / len(found),
                bytes_on_ssd_percent=100 * sum(one.on_ssd for one in found) / in_all,
                memory_gib=memory_gib,
                rates_gb_per_s=rates,
            )
        )
    return rows


def measured_rates() -> dict[str, float]:
    """What the real node loaded at, from memory and from its SSD, in GB/s."""
    rows = json.loads((RESULTS / f"{RATES_OF}.json").read_text())["rows"]
    named = {each["name"]: each for each in rows}
    return {place: named[f"hints.load_ms.{place}"]["gb_per_s"] for place in ("memory", "ssd")}


def main() -> None:
    """The command line."""
    from vllm_engine import program, results

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    args = parser.parse_args()
    traces, forebay = os.environ.get("FOREBAY_TRACES"), program(os.environ.get("FOREBAY"))
    if not traces:
        sys.exit("$FOREBAY_TRACES names no folder with the public traces")
    rows: list[dict[str, Any]] = []
    for spread_s in SPREADS_S:
        turns, block_tokens = read(forebay, Path(traces), spread_s)
        rows = rows or gap_rows(turns)
        for name, rates in (("measured", measured_rates()), ("assumed", ASSUMED)):
            for memory_gib in MEMORY_GIB:
                named = f"{name}.{spread_s // 3600}h"
                more = tier_rows(named, turns, block_tokens * TOKEN_BYTES, rates, memory_gib)
                print(json.dumps(more), flush=True)
                rows += more
    if args.json:
        args.json.write_text(json.dumps(results("session-gaps", [], None, rows), indent=2) + "\n")


if __name__ == "__main__":
    main()
