#!/usr/bin/env python3
"""Sessions of coding agents at their full length on one GPU, as InferenceX's AgentX asks: who serves more
tokens at the same interactivity, ours or vLLM's own offloading.

    bench/vllm_agentx.py FOLDER --way WAY     measures one way; those that are there are kept
    bench/vllm_agentx.py FOLDER               makes agentx.json of the ways that are there

Sessions are what `forebay trace generate` makes of the recorded distributions as they are: 12,000 to 166,000
tokens of prompt. A run is shorter than a session, so each begins at a turn in its middle: its whole prompt is
computed once, uncounted, and the turns behind it are counted. An answer's tokens and a pause are cut to the
limits below, so that one of them does not fill a run. The engine has all of its HBM, or as much as it is
told: a level shows what offloading gains only if HBM does not hold its sessions. At each level, so many
sessions are there at a time; each level has sessions of its own.

A level's interactivity is 1 / P90(time of a turn / tokens of its answer), its throughput the tokens of
answers for each second. `agentx.gain` compares the throughputs of two ways at an interactivity that both
have reached, on straight lines between levels. Knows the load; engines are `vllm_load`'s affair.
"""

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_engine import CHUNK_TOKENS, GIB, OURS, PEERS, Site, row
from vllm_load import FULL, TINY, Answer, Engine, Load, Run, Shape, Turn, figures, gpu_names, read_sessions

WAYS = ("memory", *PEERS)
PAUSE_MOST_S, ANSWER_MOST = 2.0, 1000
LEVELS = {False: (4, 8, 12, 16), True: (2, 3)}
SECONDS = {False: 75.0, True: 4.0}
MOST_TOKENS = 172_032  # Of a prompt and its answer.
ASKED = 1.15

Curve = list[tuple[float, float]]


@dataclass
class Level:
    """What so many sessions at a time came to."""

    sessions: int
    run: Run

    @property
    def point(self) -> tuple[float, float]:
        """Interactivity and throughput, in tokens a second."""
        found = figures(self.run)
        return 1 / found["per_token_p90_s"][1], found["tokens_per_s"][1]


Keep = Callable[[list[Level]], None]


def load_of(site: Site, shape: Shape) -> list[list[Turn]]:
    """Sessions from a turn in their middle on, the same for every way."""
    trace, draw = site.folder / "agentx.jsonl", random.Random("agentx")
    sessions = str(4 * sum(LEVELS[site.tiny]))
    command = [site.forebay, "trace", "generate", "--out", str(trace), "--sessions", sessions]
    subprocess.run(command, check=True, stdout=sys.stderr)
    found = []
    for turns in read_sessions(trace, shape):
        if len(turns) > 2:
            begun = turns[draw.randrange(len(turns) - 2) :]
            found.append([limited(turn, shape) for turn in begun])
    return found


def limited(turn: Turn, shape: Shape) -> Turn:
    """A turn that does not fill a run by itself."""
    output = min(turn.output_tokens, ANSWER_MOST // shape.shrink)
    room = shape.most_tokens - output
    return replace(
        turn,
        input_tokens=min(turn.input_tokens, room),
        system_tokens=min(turn.system_tokens, room),
        output_tokens=output,
        think_s=min(turn.think_s, PAUSE_MOST_S / shape.shrink),
    )


async def measure(site: Site, way: str, shape: Shape, levels: list[int], seconds: float, keep: Keep) -> None:
    """All levels on one engine, the lowest first. Those that are there are kept after each."""
    load, first = load_of(site, shape), 0
    found: list[Level] = []
    with vllm_engine.node_beside(site, way):
        engine = Engine(site, way, shape)
        try:
            await engine.ask("first", [5] * 40, 2)
            for level in levels:
                own = load[first : first + 4 * level]
                running = Load(engine, own, site.model["vocab_size"], seconds, first)
                wall_s = await running.run(level)
                first += len(own)
                run = Run(engine.version, gpu_names(site), 0.0, wall_s, running.answers)
                found.append(Level(level, run))
                keep(found)
                print(f"{level} sessions: {len(running.answers)} turns in {wall_s:.0f} s", file=sys.stderr)
        finally:
            engine.llm.shutdown()


def throughput_at(curve: Curve, interactivity: float) -> float | None:
    """On straight lines between levels; None outside of them."""
    for (one, below), (other, above) in itertools.pairwise(sorted(curve)):
        if one <= interactivity <= other:
            return below + (above - below) * (interactivity - one) / (other - one)
    return None


def gain(ours: Curve, peer: Curve) -> list[float]:
    """Our throughput as a part of the peer's, at each interactivity of either that both have reached."""
    at = [speed for speed, _ in ours + peer]
    pairs = [(throughput_at(ours, speed), throughput_at(peer, speed)) for speed in at]
    return [mine / theirs for mine, theirs in pairs if mine is not None and theirs]


def rows(ways: dict[str, list[Level]]) -> list[dict[str, Any]]:
    """Both figures of each level, what else is known of it, and the gains."""
    found = []
    for way, levels in ways.items():
        for level in levels:
            name = f"{'' if way in OURS else f'{way}.'}{level.sessions}"
            more = {name: value for name, (_, value) in figures(level.run).items()}
            more["turns"] = len(level.run.answers)
            interactivity, throughput = level.point
            found.append(row(f"agentx.interactivity.{name}", "tokens/s", [interactivity], **more))
            found.append(row(f"agentx.throughput.{name}", "tokens/s", [throughput]))
    curves = {way: [level.point for level in levels] for way, levels in ways.items()}
    for way, curve in curves.items():
        gains = gain(curves.get("memory", []), curve) if way != "memory" else []
        if gains:
            found.append(row(f"agentx.gain.{way}", "of it", gains, asked=ASKED))
    return found


def merge(folder: Path) -> None:
    """Makes the results object."""
    files = {way: folder / f"agentx-{way}.json" for way in WAYS}
    said = {way: json.loads(file.read_text()) for way, file in files.items() if file.exists()}
    if not said:
        sys.exit(f"{folder} has no ways of the load: measure them first")
    ways = {way: [level_of(one) for one in levels] for way, levels in said.items()}
    made = vllm_engine.results("vllm_agentx", next(iter(ways.values()))[0].run.gpus, None, rows(ways))
    (folder / "agentx.json").write_text(json.dumps(made, indent=2) + "\n")
    for line in made["rows"]:
        print(f"{line['name']:<40} {line['value']:>10.3f} {line['unit']}")


def level_of(said: dict[str, Any]) -> Level:
    """A level that was written."""
    answers = [Answer(**answer) for answer in said["run"]["answers"]]
    return Level(said["sessions"], Run(**said["run"] | {"answers": answers}))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where ways and results go")
    parser.add_argument("--way", choices=WAYS, help="measure this way")
    parser.add_argument("--levels", type=int, nargs="+", help="sessions at a time (default 4 8 12 16)")
    parser.add_argument("--seconds", type=float, help="of a level (default 75)")
    parser.add_argument("--hbm-tokens", type=int, help="that HBM holds (default: all that the GPU has)")
    parser.add_argument("--memory-gib", type=float, help="host memory for KV (default 60)")
    parser.add_argument("--scratch", type=Path, help="where the model and the load lie (default: in FOLDER)")
    parser.add_argument("--forebay", help="the forebay program")
    parser.add_argument("--tiny", action="store_true", help="a model of a few MB on the CPU, to try it")
    args = parser.parse_args()
    folder, tiny = args.folder.absolute(), args.tiny
    if args.way is None:
        merge(folder)
        return
    scratch = (args.scratch or folder / "scratch").absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    memory_gib = args.memory_gib or (0.25 if tiny else 60)
    program = vllm_engine.program(args.forebay)
    site = Site(scratch, tiny, int(memory_gib * GIB), 0, program, CHUNK_TOKENS)
    vllm_engine.in_environment(site.environment(args.way))
    shape = replace(TINY, shrink=64) if tiny else replace(FULL, most_tokens=MOST_TOKENS)
    shape = replace(shape, hbm_tokens=args.hbm_tokens or (shape.hbm_tokens if tiny else None))
    levels, seconds = sorted(args.levels or LEVELS[tiny]), args.seconds or SECONDS[tiny]

    def keep(found: list[Level]) -> None:
        (folder / f"agentx-{args.way}.json").write_text(json.dumps([asdict(level) for level in found]))

    asyncio.run(measure(site, args.way, shape, levels, seconds, keep))


if __name__ == "__main__":
    main()
