#!/usr/bin/env python3
"""What a step costs with our connector, with one that does nothing, and with none: three engines in turns.

    bench/vllm_step_ratio.py --json FILE

Nothing is loaded or stored: 8 or 64 requests decode. The engines share one processor, and one of them steps
at a time. In each round each has a turn, and orders change from round to round. The ratios are of turns of
one round. All three are started anew several times, since two processes of one program differ too. Knows what
is measured and how rows are made of it; engines are `vllm_child`'s and `vllm_engine`'s.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_child import Child
from vllm_engine import GIB, Site, row

WAYS = {"alone": "plain", "nothing": "nothing", "forebay": "memory"}
BATCHES = (8, 64)
CHUNK_TOKENS = 256  # With the prompts and steps below none becomes whole: there is nothing to store.
PROMPT_TOKENS = 16
STEPS = 40
ROUNDS = 30
STARTS = 4

# Seconds of a step in each round, by way.
Rounds = dict[str, list[float]]


def measure(site: Site, batches: tuple[int, ...], rounds: int) -> tuple[str, dict[int, Rounds]]:
    """vLLM's version, and what engines took that are started for this."""
    with ExitStack() as ends:
        engines: dict[str, Child] = {}
        for name, way in WAYS.items():
            given = vllm_engine.engine_arguments(site, way, 4096)
            given |= {"distributed_executor_backend": "uni", "max_num_batched_tokens": 4096}
            engines[name] = Child(given, 0, site.folder / f"{name}.log")
            ends.callback(engines[name].end)
        versions = {engine.ready() for engine in engines.values()}
        found = {batch: in_turns(engines, batch, rounds) for batch in batches}
    return versions.pop(), found


def in_turns(engines: dict[str, Child], batch: int, rounds: int) -> Rounds:
    """What a step takes in each engine, in every round. The first round is for caches."""
    found: Rounds = {name: [] for name in engines}
    orders = itertools.cycle(itertools.permutations(engines))
    for number in range(rounds + 1):
        for name in next(orders):
            step_s = engines[name].turn(batch, PROMPT_TOKENS, STEPS)
            if number:
                found[name].append(step_s)
    return found


def rows(batch: int, starts: list[Rounds], version: str) -> Iterator[dict[str, Any]]:
    """The figures of a number of requests. `by_start` are the medians of each start."""
    for name in WAYS:
        taken = [1e3 * step_s for one in starts for step_s in one[name]]
        yield row(f"vllm.step.ms.{batch}.{name}", "ms", taken, version=version)
    for name, other in (("nothing", "alone"), ("forebay", "alone"), ("forebay", "nothing")):
        by_start = [
            [mine / theirs for mine, theirs in zip(one[name], one[other], strict=True)] for one in starts
        ]
        medians = [statistics.median(ratios) for ratios in by_start]
        quarters = statistics.quantiles(itertools.chain(*by_start), n=4)
        yield row(
            f"vllm.step.ratio.{batch}.{name}_to_{other}",
            "",
            list(itertools.chain(*by_start)),
            quartiles=[quarters[0], quarters[2]],
            by_start=medians,
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each start")
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="how many requests decode")
    parser.add_argument("--forebay", help="the program")
    args = parser.parse_args()
    load, program, starts = os.getloadavg()[0], vllm_engine.program(args.forebay), []
    for _ in range(args.starts):
        with tempfile.TemporaryDirectory() as folder:
            site = Site(Path(folder), True, GIB, GIB, program, CHUNK_TOKENS)
            with vllm_engine.node_beside(site, "memory"):
                version, found = measure(site, args.batches, args.rounds)
                starts.append(found)
        made = [
            one for batch in args.batches for one in rows(batch, [each[batch] for each in starts], version)
        ]
        said = vllm_engine.results("vllm_step_ratio", [], None, made)
        said["machine"]["load_before"] = round(load, 2)
        args.json.write_text(json.dumps(said, indent=2) + "\n")
    for one in made:
        spread = (
            f"({one['min']:.3f} to {one['max']:.3f}) {one.get('quartiles', '')} {one.get('by_start', '')}"
        )
        print(f"{one['name']:40} {one['value']:8.4f} {one['unit']} {spread}")


if __name__ == "__main__":
    main()
