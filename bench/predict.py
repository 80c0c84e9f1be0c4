#!/usr/bin/env python3
"""Is `forebay simulate` right about a loaded engine that it has not seen loaded?

    bench/predict.py http://127.0.0.1:8000 --profile mine.toml --json predict.json

`--profile` is what `forebay calibrate` wrote of the engine while it was idle. A trace of coding agents is
generated and replayed at the engine, so many sessions at a time, and the same trace is simulated with the
profile. Both count the same answers: those after the first fifth, until no session is left to begin. A row
is the error of a simulated figure against the measured one. Knows both programs' files.
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import vllm_engine

MARGINALS = Path(__file__).parent / "vllm_load.toml"
SKIPPED = 0.2  # Of the answers.

Figures = dict[str, float]


def measured(requests: list[dict[str, Any]]) -> tuple[Figures, int]:
    """The figures of a replay's records, and how many answers they are of."""
    requests = sorted(requests, key=ended_s)
    since = ended_s(requests[int(SKIPPED * len(requests))])
    until = first_without_next_s(requests)
    counted = [one for one in requests if since <= ended_s(one) <= until]
    ttft = sorted(one["ttft_s"] for one in counted)
    tpot = sorted(one["tpot_s"] for one in counted if one["tpot_s"] is not None)
    figures = {
        "ttft_mean": statistics.mean(ttft),
        **{f"ttft_{name}": at(ttft, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        **{f"tpot_{name}": at(tpot, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "tokens_per_s": sum(one["output_tokens"] for one in counted) / (ended_s(counted[-1]) - since),
    }
    if all(one["cached_tokens"] is not None for one in counted):
        cached = sum(one["cached_tokens"] for one in counted)
        figures["cached"] = cached / sum(one["input_tokens"] for one in counted)
    return figures, len(counted)


def ended_s(request: dict[str, Any]) -> float:
    """When it was answered."""
    return float(request["arrival_s"] + request["e2e_s"])


def first_without_next_s(requests: list[dict[str, Any]]) -> float:
    """When the first session ended whose place no other took."""
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for one in requests:
        session = one["session"]
        begun[session] = min(one["arrival_s"], begun.get(session, math.inf))
        ended[session] = max(ended_s(one), ended.get(session, 0.0))
    last = max(begun.values())
    return min(at for at in ended.values() if at > last)


def at(ordered: list[float], share: float) -> float:
    """The value below which that share lies, as the simulator reckons it: between two it is interpolated."""
    position = share * (len(ordered) - 1)
    below = int(position)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return low + (high - low) * (position - below)


def simulated(program: str, trace: Path, folder: Path, args: argparse.Namespace) -> Figures:
    """What the simulator says of the same trace."""
    file = folder / "simulated.json"
    command = [program, "simulate", str(trace), "--profile", str(args.profile), "--engines", "1"]
    command += ["--at-once", str(args.at_once), "--ramp", "0", "--warm-up", str(SKIPPED)]
    command += ["--policies", "round-robin", "--name", "run", "--json", str(file)]
    if args.step_tokens:
        command += ["--max-num-batched-tokens", str(args.step_tokens)]
    subprocess.run(command, check=True)
    found = {}
    for line in json.loads(file.read_text())["rows"]:
        name = line["name"].removeprefix("sim.run.round-robin.")
        found[name if name == "tokens_per_s" else name.removesuffix("_s")] = line["value"]
    return found


def replay(program: str, trace: Path, log: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What came of the trace at the engine."""
    command = [program, "trace", "replay", str(trace), "--target", args.url, "--model", args.model]
    command += ["--vocab", str(args.vocabulary), "--max-sessions", str(args.at_once), "--log", str(log)]
    subprocess.run(command, check=True)
    lines = (json.loads(line) for line in log.read_text().splitlines())
    return [line for line in lines if line["kind"] == "request"]


def rows(real: Figures, said: Figures, answers: int) -> list[dict[str, Any]]:
    """The errors, with both figures beside them."""
    found = []
    for name, value in real.items():
        line = vllm_engine.row(f"sim.predict.{name}", "fraction", [said[name] / value - 1])
        found.append(line | {"measured": value, "simulated": said[name], "answers": answers})
    return found


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the engine, http://HOST:PORT")
    parser.add_argument("--profile", type=Path, required=True, help="what `forebay calibrate` wrote of it")
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--model", required=True, help="as the engine names it")
    parser.add_argument("--marginals", type=Path, default=MARGINALS, help="of the load")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-tokens", type=int, help="that a step may compute (default: the profile's)")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="token ids are drawn below it")
    parser.add_argument("--log", type=Path, help="keep the replay's records here")
    parser.add_argument("--forebay", help="the program")
    parser.add_argument("--gpu", action="append", default=[], help="its name, for the results")
    args = parser.parse_args()
    program = vllm_engine.program(args.forebay)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        command = [program, "trace", "generate", "--marginals", str(args.marginals), "--out", str(trace)]
        command += ["--sessions", str(args.sessions), "--seed", str(args.seed)]
        subprocess.run(command, check=True)
        requests = replay(program, trace, args.log or folder / "replay.jsonl", args)
        real, answers = measured(requests)
        said = simulated(program, trace, folder, args)
    made = rows(real, said, answers)
    for line in made:
        both = f"measured {line['measured']:9.4f}, simulated {line['simulated']:9.4f}"
        print(f"{line['name']:28} {both}: {line['value']:+.1%}")
    args.json.write_text(json.dumps(vllm_engine.results("predict", args.gpu, None, made), indent=2) + "\n")


if __name__ == "__main__":
    main()
