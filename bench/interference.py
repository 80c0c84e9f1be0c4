#!/usr/bin/env python3
"""How long a prompt makes others wait: measured at a running engine, and what a profile says of it.

    bench/interference.py http://127.0.0.1:8000 --profile mine.toml --json interference.json

D requests decode at an engine with vLLM's completions API, and nobody else uses it. Then prompts of several
lengths come, one after the other: cold ones, and some that only continue a prompt that the engine has. Each
keeps every decode from its next tokens for a while. The stall of a cell is that time, summed over the
decodes. `--profile` is what `forebay calibrate` has written of the same engine; the step model of
docs/step-model.md says from it what the stall should be. Knows the API and the model's formula.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
import tomllib
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_engine

DECODES = (1, 4, 8, 16, 32)
COLD_TOKENS = (512, 2048, 8192, 32768)
APPENDED_TOKENS = (512, 2048)
KEPT_TOKENS = 16384  # Of the prompt that is continued.
DECODE_CONTEXT = 2000
RUNS = 3
QUIET_S = 0.5  # Decodes alone, before each prompt.
SETTLE_S = 0.15  # After a prompt's first token: what it held up has come by then.
SILENCE_S = 120.0
# Tokens that a decode may say: nobody reads them to the end.
ENDLESS_TOKENS = 20_000


@dataclass(frozen=True)
class StepModel:
    """The constants of a profile, in seconds."""

    floor: float
    linear: float
    attention: float
    kv_read: float
    request: float
    step_tokens: int

    @classmethod
    def read(cls, profile: Path, step_tokens: int | None) -> "StepModel":
        """A calibrated profile has the same floor with graphs and without."""
        said = tomllib.loads(profile.read_text())
        step = said["step"]
        return cls(
            step["floor_graph_us"] / 1e6,
            step["linear_us_per_token"] / 1e6,
            step["attention_ns_per_pair"] / 1e9,
            step["kv_read_ns_per_context_token"] / 1e9,
            step["us_per_request"] / 1e6,
            step_tokens or said["scheduler"]["max_batched_tokens"],
        )

    def step_s(self, shares: Sequence[tuple[int, int]]) -> float:
        """A step in which each request computes so many tokens behind so many."""
        new = sum(tokens for tokens, _ in shares)
        pairs = sum(tokens * (context + tokens / 2) for tokens, context in shares)
        read = self.kv_read * sum(context for _, context in shares)
        work = max(self.floor, self.linear * new) + self.attention * pairs
        return work + read + self.request * len(shares)

    def stall_s(self, new: int, cached: int, decodes: int, context: int) -> float:
        """What the steps of a prompt take beyond steps of the decodes alone, summed over the decodes."""
        others = [(1, context)] * decodes
        alone, stall, done = self.step_s(others), 0.0, 0
        while done < new:
            chunk = min(new - done, self.step_tokens - decodes)
            stall += self.step_s([*others, (chunk, cached + done)]) - alone
            done += chunk
        return stall * decodes


class Engine:
    """The completions of one model at an address."""

    def __init__(self, url: str, vocabulary: int) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            sys.exit(f"URL: '{url}' is not http://HOST:PORT")
        self.host, self.port, self.vocabulary = parts.hostname, parts.port, vocabulary
        self.random = random.Random(time.time_ns())
        self.model = self.models()[0]

    def models(self) -> list[str]:
        """What it serves."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SILENCE_S)
        connection.request("GET", "/v1/models")
        return [str(one["id"]) for one in json.load(connection.getresponse())["data"]]

    def draw(self, tokens: int) -> list[int]:
        """Token ids that nobody has sent before."""
        return self.random.choices(range(3, self.vocabulary), k=tokens)

    def ask(self, prompt: list[int], tokens: int) -> Iterator[float]:
        """The time of each token, while it is said. The connection ends with the iterator."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SILENCE_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"the engine answered {answer.status}: {answer.read(2000).decode(errors='replace')}")
        try:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield time.perf_counter()
        finally:
            connection.close()


@dataclass
class Decode:
    """A request that says tokens until it is told to stop."""

    engine: Engine
    context: int
    times: list[float] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> threading.Thread:
        """In a thread of its own."""
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        """Notes when each token came."""
        for at in self.engine.ask(self.engine.draw(self.context), ENDLESS_TOKENS):
            self.times.append(at)
            if self.is_over.is_set():
                return

    def gap_s(self, since: float, until: float) -> float:
        """The average time between tokens that came in between."""
        times = [at for at in list(self.times) if since <= at <= until]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else float("nan")

    def stall_s(self, asked: float, until: float, gap_s: float) -> float:
        """What lies between its tokens around a prompt beyond what there would be without the prompt."""
        times = list(self.times)
        before = max(at for at in times if at <= asked)
        within = [at for at in times if asked < at <= until]
        return within[-1] - before - gap_s * len(within) if within else until - before


def measure(engine: Engine, decodes: list[Decode], prompt: list[int]) -> float:
    """The stall of one prompt, summed over the decodes."""
    quiet = time.perf_counter()
    time.sleep(QUIET_S)
    asked = time.perf_counter()
    for _ in engine.ask(prompt, 1):
        pass
    time.sleep(SETTLE_S)
    until = time.perf_counter()
    return sum(decode.stall_s(asked, until, decode.gap_s(quiet, asked)) for decode in decodes)


def grid(engine: Engine, model: StepModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells."""
    rows = []
    for count in args.decodes:
        decodes = [Decode(engine, args.context) for _ in range(count)]
        threads = [decode.start() for decode in decodes]
        while not all(len(decode.times) > 1 for decode in decodes):
            time.sleep(0.01)
        kept = engine.draw(args.kept)
        measure(engine, decodes, kept)
        cells = [(new, 0) for new in args.cold] + [(new, len(kept)) for new in args.appended]
        for new, cached in cells:
            said = [len(decode.times) for decode in decodes]
            fresh = [kept[:cached] + engine.draw(new) for _ in range(args.runs)]
            stalls = [measure(engine, decodes, prompt) for prompt in fresh]
            context = args.context + round(statistics.mean(said))
            rows.append(row(count, new, cached, stalls, model.stall_s(new, cached, count, context)))
        for decode in decodes:
            decode.is_over.set()
        for thread in threads:
            thread.join()
        time.sleep(1.0)  # The engine notices that nobody listens any more.
    return rows


def row(count: int, new: int, cached: int, stalls: list[float], predicted_s: float) -> dict[str, Any]:
    """One cell, as all benchmarks write it."""
    kind = f"{new}_behind_{cached}" if cached else f"{new}_cold"
    line = vllm_engine.row(f"interference.{count}_decodes.{kind}", "s", stalls)
    line |= {"predicted": predicted_s, "error": predicted_s / line["value"] - 1}
    print(f"{line['name']:44} {line['value']:9.4f} s, predicted {predicted_s:9.4f}: {line['error']:+.1%}")
    return line


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The error of all stalls together, and how far single cells are off."""
    stall, predicted = (sum(line[name] for line in rows) for name in ("value", "predicted"))
    errors = sorted(abs(line["error"]) for line in rows)
    line = vllm_engine.row("sim.interference.stall", "fraction", [predicted / stall - 1])
    of_cells = {"cell_error_p50": statistics.median(errors), "cell_error_max": errors[-1]}
    return line | {"cells": len(rows)} | of_cells


def numbers(text: str) -> list[int]:
    """A list with commas; `none` is an empty one."""
    return [] if text == "none" else [int(one) for one in text.split(",")]


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the engine, http://HOST:PORT")
    parser.add_argument("--profile", type=Path, required=True, help="what `forebay calibrate` wrote of it")
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--step-tokens", type=int, help="that a step may compute (default: the profile's)")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="token ids are drawn below it")
    parser.add_argument("--decodes", type=numbers, default=list(DECODES))
    parser.add_argument("--cold", type=numbers, default=list(COLD_TOKENS))
    parser.add_argument("--appended", type=numbers, default=list(APPENDED_TOKENS))
    parser.add_argument("--kept", type=int, default=KEPT_TOKENS, help="length of what is continued")
    parser.add_argument("--context", type=int, default=DECODE_CONTEXT, help="of a decode at its start")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--gpu", action="append", default=[], help="its name, for the results")
    args = parser.parse_args()
    engine = Engine(args.url, args.vocabulary)
    rows = grid(engine, StepModel.read(args.profile, args.step_tokens), args)
    rows.append(summed(rows))
    print(f"all stalls together: {rows[-1]['value']:+.1%}")
    made = vllm_engine.results("interference", args.gpu, None, rows)
    args.json.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
