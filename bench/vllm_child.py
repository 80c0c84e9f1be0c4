"""A vLLM in a process of its own, told by lines of JSON what to do: the program, and how others talk to it.

The first line is the arguments of `LLM`; each further line is the arguments of one question. Answers are
lines too: the first token as soon as it is there, the end when all tokens are. Knows vLLM's engine and
processor time; must never know what is compared with what.
"""

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import vllm_engine

END_S = 30
BEGIN_STEPS = 10  # Not timed: allocators and caches settle.
TURN_STEPS = 2  # Neither: behind each change between with the connector and without.
BEGIN_HITS = 2  # Neither: the first one computes, the second one makes room.
TAIL_TOKENS = 8  # Behind a prefix.
PAUSE_S = 0.001
NUDGE = [3, 5, 7, 11]
NUDGE_PAUSE_S = 0.02


@dataclass
class Said:
    """An answer. Seconds are from the question on, as whoever asked sees them."""

    first_s: float
    tokens: list[int]
    cached: int
    params: dict[str, Any] | None


class Child:
    """An engine's process, from outside."""

    def __init__(self, arguments: dict[str, Any], processor: int | None, log: Path, more: Any = None) -> None:
        """Starts it on one processor, or where there is none on the GPU. `more` is environment; `ready` says
        when it can be asked."""
        environment = os.environ | vllm_engine.QUIET | (more or {})
        if processor is not None:
            mine = sorted(os.sched_getaffinity(0))
            environment |= vllm_engine.ON_CPU
            environment["VLLM_CPU_OMP_THREADS_BIND"] = str(mine[processor % len(mine)])
            environment["OMP_NUM_THREADS"] = "1"  # More would wait for one another on that processor.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.write(arguments)

    def write(self, said: dict[str, Any]) -> None:
        """A line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """A line from it; ends this program where it has died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"an engine has died; the end of {self.log}:\n{self.log.read_text()[-3000:]}")
        return dict(json.loads(line))

    def ready(self) -> str:
        """Waits for it; vLLM's version."""
        return str(self.read()["version"])

    def ask(self, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> Said:
        """Asks for `tokens` tokens behind a prompt."""
        return self.answer(self.post(prompt, tokens, params))

    def post(self, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> float:
        """The same without waiting for the answer: when it was asked."""
        begun = time.perf_counter()
        self.write({"prompt": prompt, "tokens": tokens, "params": params})
        return begun

    def answer(self, begun: float) -> Said:
        """What is said to what was posted then."""
        said = self.read()
        first_s = time.perf_counter() - begun
        if "tokens" not in said:
            said = self.read()
        return Said(first_s, said["tokens"], said["cached"], said["params"])

    def steps(self, requests: int, prompt_tokens: int, turns: int, count: int) -> list[tuple[float, float]]:
        """Seconds of a step in which `requests` requests decode and nothing else happens, with the connector
        and without, in turns of `count` steps each: the medians of each pair of turns."""
        self.write({"requests": requests, "prompt_tokens": prompt_tokens, "turns": turns, "count": count})
        return [(attached, detached) for attached, detached in self.read()["steps"]]

    def turn(self, requests: int, prompt_tokens: int, count: int) -> float:
        """Seconds of such a step, as the engine is: the median of `count`. Before and after it the engine is
        idle, and others may have the processor."""
        self.write({"requests": requests, "prompt_tokens": prompt_tokens, "timed": count})
        return float(self.read()["step_s"])

    def arrivals(self, prompts: list[list[int]], gap_s: float, drop: bool) -> list[Said]:
        """Asks for one token behind each prompt, one prompt each `gap_s` seconds, whatever was answered by
        then. Seconds are from when a prompt was due. With `drop` HBM's prefix cache is emptied first."""
        self.write({"prompts": prompts, "gap_s": gap_s, "drop": drop})
        return [Said(**one, params=None) for one in self.read()["arrivals"]]

    def hits(self, prefix_tokens: int, runs: int, layerwise: bool) -> list[dict[str, float]]:
        """What loading a prefix takes each time: `Inside.hits` says what that is."""
        self.write({"prefix_tokens": prefix_tokens, "runs": runs, "layerwise": layerwise})
        return list(self.read()["hits"])

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        return session_cpu_s(self.process.pid)

    def end(self) -> None:
        """Ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def session_cpu_s(session: int) -> float:
    """Processor time of the processes of a session that live, and of those that they have waited for."""
    members = [
        stat for stat in map(stat_of, Path("/proc").glob("[0-9]*")) if stat and int(stat[3]) == session
    ]
    return sum(map(seconds, members))


def process_cpu_s(process: int) -> float:
    """Processor time of one process."""
    return seconds(stat_of(Path(f"/proc/{process}")))


def stat_of(process: Path) -> list[str]:
    """What the kernel says of a process, from its state on; nothing if it has gone."""
    with contextlib.suppress(OSError):
        return (process / "stat").read_text().rsplit(")", 1)[1].split()
    return []


def seconds(stat: list[str]) -> float:
    """Of a process and the children that it has waited for, in user mode and in the kernel."""
    return sum(int(ticks) for ticks in stat[11:15]) / os.sysconf("SC_CLK_TCK")


class Inside:
    """The engine, in the process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Starts it, with weights that are the same in all."""
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.llm.collective_rpc(vllm_engine.seed_weights)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.core.step_fn = self.noted(self.core.step_fn)
        self.executed = False
        self.watch: Watch | None = None
        self.asked = 0

    def add(self, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> str:
        """Adds a request."""
        from vllm import SamplingParams

        self.asked += 1
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self.engine.add_request(str(self.asked), {"prompt_token_ids": prompt}, sampling)
        return str(self.asked)

    def ask(self, prompt: list[int], tokens: int, params: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Says that the first token is there, then all."""
        self.add(prompt, tokens, params)
        first = True
        while self.engine.has_unfinished_requests():
            for output in self.step():
                if output.finished:
                    said, cached = list(output.outputs[0].token_ids), output.num_cached_tokens or 0
                    yield {"tokens": said, "cached": cached, "params": output.kv_transfer_params}
                elif first:
                    first = False
                    yield {}

    def step(self) -> list[Any]:
        """A step as vLLM's core process makes it, with its pause if nothing was computed."""
        outputs = self.engine.step()
        if not self.executed and self.core.scheduler.has_requests():
            time.sleep(PAUSE_S)
        return list(outputs)

    def noted(self, step: Any) -> Any:
        """The core's step, which says whether something was computed."""

        def stepped() -> Any:
            outputs, self.executed = step()
            return outputs, self.executed

        return stepped

    def rest(self, lines: SimpleQueue[str | None]) -> str | None:
        """The next line. Until it comes, what is left of requests that have ended is done, as in a server."""
        while lines.empty() and self.core.scheduler.has_requests():
            self.step()
        return lines.get()

    def steps(self, requests: int, prompt_tokens: int, turns: int, count: int) -> Iterator[dict[str, Any]]:
        """Times steps of requests that have all begun, with the connector and without, and drops them."""
        names = self.begin(requests, prompt_tokens, 2 * turns * (TURN_STEPS + count))
        switch, pairs = Switch(self.core), []
        for turn in range(turns):
            found = {}
            for attached in (True, False) if turn % 2 == 0 else (False, True):
                switch.turn(attached)
                times = [self.timed_step() for _ in range(TURN_STEPS + count)]
                found[attached] = statistics.median(times[TURN_STEPS:])
            pairs.append((found[True], found[False]))
        switch.turn(True)
        self.abort(names)
        yield {"steps": pairs}

    def turn(self, requests: int, prompt_tokens: int, timed: int) -> Iterator[dict[str, Any]]:
        """Times steps of requests that have all begun, and drops them."""
        names = self.begin(requests, prompt_tokens, timed)
        step_s = statistics.median(self.timed_step() for _ in range(timed))
        self.abort(names)
        yield {"step_s": step_s}

    def begin(self, requests: int, prompt_tokens: int, steps: int) -> list[str]:
        """Adds requests and steps until all decode; so many steps may follow."""
        draw = random.Random(self.asked)
        prompts = [draw.choices(range(3, 1000), k=prompt_tokens) for _ in range(requests)]
        names = [self.add(prompt, BEGIN_STEPS + steps + requests) for prompt in prompts]
        begun: set[str] = set()
        while len(begun) < requests:
            begun.update(output.request_id.split("-")[0] for output in self.engine.step())
        for _ in range(BEGIN_STEPS):
            self.engine.step()
        return names

    def abort(self, names: list[str]) -> None:
        """Drops requests."""
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def timed_step(self) -> float:
        """Seconds that a step takes."""
        begun = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - begun

    def arrivals(self, prompts: list[list[int]], gap_s: float, drop: bool) -> Iterator[dict[str, Any]]:
        """Asks for one token behind each prompt, and says of each when it came."""
        if drop:
            self.drop()
        begun, names, said = time.perf_counter(), list[str](), dict[str, dict[str, Any]]()
        while len(said) < len(prompts):
            wait_s = len(names) * gap_s - (time.perf_counter() - begun)
            if len(names) < len(prompts) and wait_s <= 0:
                names.append(self.add(prompts[len(names)], 1))
            elif not self.engine.has_unfinished_requests():
                time.sleep(wait_s)
            for output in self.step() if self.engine.has_unfinished_requests() else ():
                name = output.request_id.split("-")[0]
                due_s = begun + names.index(name) * gap_s
                tokens, cached = list(output.outputs[0].token_ids), output.num_cached_tokens or 0
                said[name] = {"first_s": time.perf_counter() - due_s, "tokens": tokens, "cached": cached}
        yield {"arrivals": [said[name] for name in names]}

    def hits(self, prefix_tokens: int, runs: int, layerwise: bool) -> Iterator[dict[str, Any]]:
        """Loads a prefix again and again: seconds until its last layer is there, and in the connector."""
        draw = random.Random(prefix_tokens)
        prompt = draw.choices(range(3, 1000), k=prefix_tokens + TAIL_TOKENS)
        watch = self.watch = self.watch or Watch(self.core.scheduler.connector._scheduler)
        watch.scheduler.layerwise_possible = layerwise
        found = []
        for run in range(runs + BEGIN_HITS):
            self.drop()
            watch.begin()
            (said,) = self.ask(prompt, 1, None)
            if run < BEGIN_HITS:
                continue
            if said["cached"] < prefix_tokens:
                raise RuntimeError(f"{said['cached']} of {prefix_tokens} tokens were loaded")
            found.append({"ready_s": watch.ready_s, "inside_s": watch.inside_s, "load_s": watch.load_s})
        yield {"hits": found}

    def drop(self) -> None:
        """Empties vLLM's own prefix cache. Blocks that are still stored hold it up; steps let go of them, and
        where there are none to take, those of a request that is shorter than a block."""
        end = time.monotonic() + END_S
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise TimeoutError(f"blocks are still held after {END_S} s")
            if self.core.scheduler.has_requests():
                self.engine.step()
            else:
                list(self.ask(NUDGE, 1, None))
                time.sleep(NUDGE_PAUSE_S)


class Switch:
    """Takes the connector out of a running engine and puts it back.

    Without it vLLM steps as if it had none."""

    def __init__(self, core: Any) -> None:
        """What is there now."""
        from vllm.distributed.kv_transfer import kv_transfer_state

        runner = core.model_executor.driver_worker.worker.model_runner
        # vLLM's newer runners have a handle of their own, which can be told.
        self.handle = getattr(runner, "kv_connector", None)
        self.scheduler, self.state = core.scheduler, kv_transfer_state
        self.connector, self.agent = core.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT

    def turn(self, attached: bool) -> None:
        """From the next step on."""
        self.scheduler.connector = self.connector if attached else None
        self.state._KV_CONNECTOR_AGENT = self.agent if attached else None
        if self.handle is not None:
            self.handle.set_disabled(not attached)


class Watch:
    """When a load of our connector begins and ends, and how long the engine's thread is in it."""

    CALLS = {
        "scheduler": ("match", "blocks_allocated", "build_step"),
        "worker": ("begin_step", "wait_for_layer", "take_finished"),
    }

    def __init__(self, scheduler: Any) -> None:
        """Of all loads from now on. What was found is loaded, whether it pays or not."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.scheduler, self.worker = scheduler, get_kv_transfer_group()._worker
        self.last_layer = max(self.worker.layers, key=self.worker.layers.__getitem__)
        scheduler.cost_model.chunks_to_load = lambda found, *_: found.chunks
        for name, half in (("scheduler", scheduler), ("worker", self.worker)):
            for call in self.CALLS[name]:
                setattr(half, call, self.timed(call, getattr(half, call)))
        self.begin()

    def begin(self) -> None:
        """From the next call on."""
        self.open, self.loading = True, False
        self.first_s = self.ready_s = self.inside_s = 0.0
        self.load_us = self.worker.cache.stats().get("load_us", 0)

    @property
    def load_s(self) -> float:
        """What the copies took, from the first to the last."""
        return float(self.worker.cache.stats()["load_us"] - self.load_us) / 1e6

    def timed(self, name: str, call: Any) -> Any:
        """The call, watched until the load is over."""

        def watched(*arguments: Any) -> Any:
            start = time.perf_counter()
            said = call(*arguments)
            end = time.perf_counter()
            if self.open:
                self.first_s = self.first_s or start
                self.inside_s += end - start
                self.ready_s = end - self.first_s
                self.loading = self.loading or bool(self.worker.loads)
                self.open = not self.is_over(name, arguments)
            return said

        return watched

    def is_over(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Whether the last layer is there now."""
        if name == "wait_for_layer":
            return bool(self.worker.layerwise) and arguments[0] == self.last_layer
        return name == "take_finished" and self.loading and not self.worker.loads


def forward(lines: SimpleQueue[str | None]) -> None:
    """Standard input, line by line, and that it has ended."""
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


def main() -> None:
    """Reads lines until there are none. What vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(said: dict[str, Any]) -> None:
        print(json.dumps(said), file=answers, flush=True)

    inside = Inside(json.loads(sys.stdin.readline()))
    import vllm

    answer({"version": vllm.__version__})
    lines: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=forward, args=(lines,), daemon=True).start()
    while (line := inside.rest(lines)) is not None:
        order = json.loads(line)
        kinds = {"timed": inside.turn, "turns": inside.steps, "runs": inside.hits, "prompt": inside.ask}
        kinds["gap_s"] = inside.arrivals
        do = next(kind for key, kind in kinds.items() if key in order)
        for said in do(**order):
            answer(said)


if __name__ == "__main__":
    main()
