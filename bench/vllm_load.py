#!/usr/bin/env python3
"""32 sessions of coding agents at a time on one vLLM whose HBM does not hold them all: ours beside vLLM's.

    bench/vllm_load.py FOLDER --part PART     measures one part once; `bench/vllm.sh` runs them all
    bench/vllm_load.py FOLDER                 makes load.json of the runs that are there

The load is what `forebay trace generate` makes of the distributions in `vllm_load.toml`: a session's
next prompt is its last one, the answer to it, and something new; it comes after a pause. A session that
ends makes room for the next one. The first turns of the first 32 fill the caches and are not counted.
`hbm` is vLLM alone with all of its HBM, the best there could be; all others have a part of it. A part that
is measured again is another run of it. Knows the load and how rows are made of what came of it.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_engine import CHUNK_TOKENS, GIB, OURS, PEERS, Site

PARTS = ("hbm", "plain", *PEERS, "memory")
MARGINALS = Path(__file__).with_suffix(".toml")
WARM_TOKENS = 5000  # A turn with fewer new ones is warm.
TURN_LIMIT_S = 120  # A turn that takes longer is stuck: the part fails, and says which.
TELL_S = 10.0


@dataclass(frozen=True)
class Shape:
    """How large the load is."""

    at_once: int
    hbm_tokens: int | None  # Of all but `hbm`; None: all that the GPU has.
    most_tokens: int  # Of a prompt and its answer.
    shrink: int  # Divides all lengths and pauses.
    sessions: int | None  # Instead of the stated number.


FULL = Shape(at_once=32, hbm_tokens=256 << 10, most_tokens=64 << 10, shrink=1, sessions=None)
TINY = Shape(at_once=4, hbm_tokens=4 << 10, most_tokens=2560, shrink=32, sessions=6)


@dataclass(frozen=True)
class Turn:
    """What is asked."""

    input_tokens: int
    output_tokens: int
    system_tokens: int
    system: int  # Sessions with the same have the same system prompt.
    think_s: float


@dataclass
class Answer:
    """What came of a turn. Times in seconds."""

    session: int
    turn: int
    input_tokens: int
    new_tokens: int
    cached_tokens: int
    output_tokens: int
    asked_s: float  # After the first counted turn of all.
    queued_s: float  # Until vLLM computed the first of it. What is loaded before that is within.
    ttft_s: float
    total_s: float

    @property
    def tpot_s(self) -> float:
        """From token to token."""
        return (self.total_s - self.ttft_s) / max(1, self.output_tokens - 1)


@dataclass
class Run:
    """What one engine did."""

    version: str
    gpus: list[str]
    ready_s: float
    wall_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)


def sessions(site: Site, shape: Shape) -> list[list[Turn]]:
    """The load, the same in every part."""
    trace = site.folder / "load.jsonl"
    command = [site.forebay, "trace", "generate", "--marginals", str(MARGINALS), "--out", str(trace)]
    if shape.sessions:
        command += ["--sessions", str(shape.sessions)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return read_sessions(trace, shape)


def read_sessions(trace: Path, shape: Shape) -> list[list[Turn]]:
    """The turns of each session of a trace."""
    found: dict[str, list[Turn]] = {}
    for line in trace.read_text().splitlines():
        request = json.loads(line)
        turn = Turn(
            max(1, request["input_tokens"] // shape.shrink),
            max(2, request["output_tokens"] // shape.shrink),
            request["system_tokens"] // shape.shrink,
            request["blocks"][0],
            request.get("think_us", 0) / 1e6 / shape.shrink,
        )
        found.setdefault(request["session"], []).append(turn)
    return list(found.values())


class Transcript:
    """A session's prompt as it grows. Token ids come from seeds; answers are the engine's own."""

    def __init__(self, session: int, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.fresh = random.Random(f"session {session}")
        self.tokens: list[int] = []
        self.asked = 0  # Length of the last prompt.

    def draw(self, source: random.Random, tokens: int) -> list[int]:
        return source.choices(range(3, self.vocabulary), k=tokens)

    def ask(self, turn: Turn) -> tuple[list[int], int]:
        """The prompt of a turn, and how much is new. A shorter one begins anew behind the system prompt."""
        if turn.input_tokens <= self.asked or not self.tokens:
            self.tokens = self.draw(random.Random(f"system {turn.system}"), turn.system_tokens)
        known = len(self.tokens)
        self.tokens += self.draw(self.fresh, max(1, turn.input_tokens - known))
        self.asked = turn.input_tokens
        return list(self.tokens), len(self.tokens) - known

    def note(self, answer: list[int]) -> None:
        """The answer is part of the next prompt."""
        self.tokens += answer


@dataclass
class Said:
    """What an engine said, and when."""

    first_s: float = 0.0
    total_s: float = 0.0
    queued_s: float = 0.0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)


class Engine:
    """A vLLM in a process of its own, as servers run it."""

    def __init__(self, site: Site, part: str, shape: Shape) -> None:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        way = "plain" if part == "hbm" else part
        arguments = vllm_engine.engine_arguments(site, way, shape.most_tokens)
        if shape.hbm_tokens is None or (part == "hbm" and not site.tiny):
            arguments["gpu_memory_utilization"] = 0.9
        else:
            arguments["num_gpu_blocks_override"] = shape.hbm_tokens // site.block_tokens
        self.version = vllm.__version__
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self.sampling = lambda tokens: vllm.SamplingParams(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    async def ask(self, name: str, prompt: list[int], tokens: int) -> Said:
        """One request."""
        begun, said = time.perf_counter(), Said()
        stream = self.llm.generate({"prompt_token_ids": prompt}, self.sampling(tokens), name)
        async for output in stream:
            said.first_s = said.first_s or time.perf_counter() - begun
            said.cached = max(said.cached, output.num_cached_tokens or 0)
            said.tokens += output.outputs[0].token_ids
            said.queued_s = output.metrics.scheduled_ts - output.metrics.queued_ts
        said.total_s = time.perf_counter() - begun
        return said


class Load:
    """Sessions on an engine, so many at a time."""

    def __init__(
        self,
        engine: Engine,
        load: list[list[Turn]],
        vocabulary: int,
        seconds: float = math.inf,
        first: int = 0,
    ) -> None:
        """Turns begin for so many `seconds`. `first` is the number of the first session."""
        self.engine, self.vocabulary, self.seconds = engine, vocabulary, seconds
        self.waiting = iter(enumerate(load, first))
        self.answers: list[Answer] = []
        self.begun = time.perf_counter()

    async def turn(self, transcript: Transcript, session: int, number: int, turn: Turn) -> Answer:
        """One request."""
        prompt, new = transcript.ask(turn)
        name, asked = f"{session}-{number}", time.perf_counter()
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                said = await self.engine.ask(name, prompt, turn.output_tokens)
        except TimeoutError:
            sys.exit(f"turn {number} of session {session}, {len(prompt)} tokens: no end in {TURN_LIMIT_S} s")
        transcript.note(said.tokens)
        return Answer(
            session=session,
            turn=number,
            input_tokens=len(prompt),
            new_tokens=new,
            cached_tokens=said.cached,
            output_tokens=len(said.tokens),
            asked_s=asked - self.begun,
            queued_s=said.queued_s,
            ttft_s=said.first_s,
            total_s=said.total_s,
        )

    async def agent(self, filled: asyncio.Barrier) -> None:
        """One session after the other. All agents have filled the caches before the first counted turn."""
        counted = False
        for session, turns in self.waiting:
            transcript = Transcript(session, self.vocabulary)
            for number, turn in enumerate(turns):
                if counted and number > 0:
                    await asyncio.sleep(turn.think_s)
                if counted and time.perf_counter() - self.begun > self.seconds:
                    return
                answer = await self.turn(transcript, session, number, turn)
                if counted:
                    self.answers.append(answer)
                else:
                    await filled.wait()
                    self.begun = time.perf_counter()
                counted = True

    async def run(self, at_once: int) -> float:
        """Seconds that the counted turns took in all."""
        filled = asyncio.Barrier(at_once)
        telling = asyncio.create_task(self.tell())
        async with asyncio.TaskGroup() as agents:
            for _ in range(at_once):
                agents.create_task(self.agent(filled))
        telling.cancel()
        return time.perf_counter() - self.begun

    async def tell(self) -> None:
        """Says from time to time how far it is, and what the engine counts."""
        while True:
            await asyncio.sleep(TELL_S)
            print(f"{len(self.answers)} turns answered", file=sys.stderr, flush=True)
            await self.engine.llm.do_log_stats()


async def run_part(site: Site, part: str, shape: Shape) -> Run:
    """One engine, with a node beside it if it needs one."""
    load = sessions(site, shape)
    with vllm_engine.node_beside(site, part):
        begun = time.perf_counter()
        engine = Engine(site, part, shape)
        try:
            await engine.ask("first", [5] * 40, 2)
            found = Run(engine.version, gpu_names(site), time.perf_counter() - begun)
            running = Load(engine, load, site.model["vocab_size"])
            found.wall_s = await running.run(min(shape.at_once, len(load)))
            found.answers = running.answers
            return found
        finally:
            engine.llm.shutdown()


def gpu_names(site: Site) -> list[str]:
    """The GPU that an engine has."""
    if site.tiny:
        return []
    import torch

    return [torch.cuda.get_device_name(0)]


def figures(run: Run) -> dict[str, tuple[str, float]]:
    """Name, unit and value of what is said of a run."""
    ttft = sorted(answer.ttft_s for answer in run.answers)
    prompts = sum(answer.input_tokens for answer in run.answers)
    per_token = sorted(answer.total_s / answer.output_tokens for answer in run.answers)
    return {
        "ttft_mean_s": ("s", statistics.mean(ttft)),
        "queued_mean_s": ("s", statistics.mean(answer.queued_s for answer in run.answers)),
        "ttft_p50_s": ("s", statistics.median(ttft)),
        "ttft_p99_s": ("s", ttft[math.ceil(0.99 * len(ttft)) - 1]),
        "tpot_p50_s": ("s", statistics.median(answer.tpot_s for answer in run.answers)),
        "per_token_p90_s": ("s", per_token[math.ceil(0.9 * len(per_token)) - 1]),
        "tokens_per_s": ("1/s", sum(answer.output_tokens for answer in run.answers) / run.wall_s),
        "cached_percent": ("%", 100 * sum(answer.cached_tokens for answer in run.answers) / prompts),
    }


def rows(parts: dict[str, list[Run]]) -> Iterator[dict[str, Any]]:
    """Medians over runs. Ours has plain names, `hbm` as ceiling, and as peer the one whose first tokens come
    soonest in the mean; the others' names stand behind theirs.
    """
    units = {figure: unit for figure, (unit, _) in figures(next(iter(parts.values()))[0]).items()}
    found = {
        name: {figure: [figures(run)[figure][1] for run in runs] for figure in units}
        for name, runs in parts.items()
    }
    mean = {way: statistics.median(found[way]["ttft_mean_s"]) for way in PEERS if way in found}
    peer = min(mean, key=mean.__getitem__, default=None)
    for name, runs in parts.items():
        for figure, unit in units.items():
            values = found[name][figure]
            suffix = "" if name in OURS else f".{name}"
            line = {"name": f"vllm.load.{figure}{suffix}", "unit": unit, "value": statistics.median(values)}
            line |= {"min": min(values), "max": max(values), "runs": len(runs)}
            line["requests"] = len(runs[0].answers)
            if name in OURS and "hbm" in found:
                best = statistics.median(found["hbm"][figure])
                line |= {"ceiling": best, "ratio": line["value"] / best if best else None}
            if name in OURS and peer is not None:
                line["peer"] = {"name": PEERS[peer], "version": parts[peer][0].version}
                line["peer"]["value"] = statistics.median(found[peer][figure])
            yield line


def runs_of(folder: Path, part: str) -> list[Run]:
    """What was measured of a part so far."""
    file = folder / f"load-{part}.json"
    said = json.loads(file.read_text()) if file.exists() else []
    return [Run(**run | {"answers": [Answer(**answer) for answer in run["answers"]]}) for run in said]


def merge(folder: Path) -> None:
    """Makes the results object."""
    parts = {name: runs for name in PARTS if (runs := runs_of(folder, name))}
    if not parts:
        sys.exit(f"{folder} has no parts of the load: measure them first")
    some = next(iter(parts.values()))[0]
    made = vllm_engine.results("vllm_load", some.gpus, None, list(rows(parts)))
    (folder / "load.json").write_text(json.dumps(made, indent=2) + "\n")
    warm = sum(answer.new_tokens < WARM_TOKENS for answer in some.answers) / len(some.answers)
    print(f"{len(some.answers)} turns, {100 * warm:.0f} % of them warm (fewer than {WARM_TOKENS} new tokens)")
    for line in made["rows"]:
        spread = f"{line['min']:.4f} to {line['max']:.4f} in {line['runs']}"
        ceiling = f"{line['ceiling']:>10.4f}" if "ceiling" in line else ""
        peer = f"{line['peer']['name']} {line['peer']['value']:.4f}" if "peer" in line else ""
        print(f"{line['name']:<40} {line['value']:>10.4f} {line['unit']:<4} {spread} {ceiling} {peer}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where parts and results go")
    parser.add_argument("--part", choices=PARTS, help="measure this part once more")
    parser.add_argument("--memory-gib", type=float, help="host memory for KV (default 60)")
    parser.add_argument("--sessions", type=int, help="of the load (default 56, as the load says)")
    parser.add_argument("--scratch", type=Path, help="where the model and the load lie (default: in FOLDER)")
    parser.add_argument(
        "--chunk-tokens", type=int, default=CHUNK_TOKENS, help="of ours (default: as the connector)"
    )
    parser.add_argument("--forebay", help="the forebay program")
    parser.add_argument("--tiny", action="store_true", help="a model of a few MB on the CPU, to try it")
    args = parser.parse_args()
    folder = args.folder.absolute()
    if args.part is None:
        merge(folder)
        return
    scratch = (args.scratch or folder / "scratch").absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    memory_gib = args.memory_gib or (0.25 if args.tiny else 60)
    program = vllm_engine.program(args.forebay)
    site = Site(scratch, args.tiny, int(memory_gib * GIB), 0, program, args.chunk_tokens)
    vllm_engine.in_environment(site.environment(args.part))
    shape = TINY if args.tiny else FULL
    shape = replace(shape, sessions=args.sessions or shape.sessions)
    runs = runs_of(folder, args.part)
    runs.append(asyncio.run(run_part(site, args.part, shape)))
    (folder / f"load-{args.part}.json").write_text(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    main()
