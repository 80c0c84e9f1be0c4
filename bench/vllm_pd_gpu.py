#!/usr/bin/env python3
"""Hand-over of a prompt between two GPUs of a host: straight, through the node, and NixlConnector.

    bench/vllm_pd_gpu.py --json FILE [--sizes 2048,8192,32768]

Each way has a prefiller on GPU 0 and a decoder on GPU 1, in processes that see one GPU each. All pairs run
at once and are asked in turns, for prompts that nobody has seen: the same ones, and all must say the same.
What is timed is from posting to the decoder to its first token. The ceiling is a hit in the decoder's own
cache, of the connector with which that is sooner, and the time that a contiguous copy of the prompt's KV
takes from GPU to GPU. Knows what is measured; engines are `vllm_child`'s and `vllm_engine`'s.
"""

import argparse
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_child import Child
from vllm_engine import GIB, Site, row
from vllm_pd import AT_ONCE, PREFILL

RUNS = 7
SAID_TOKENS = 8
DIRECT, NODE, NIXL = "direct", "node", "nixl"
WAYS = (DIRECT, NODE, NIXL)
GPU_PART = 0.84  # Of the memory of a GPU, for the engines on it together.
COPY_BYTES = GIB
# Steps of one token in CUDA graphs, as in a server; without the minutes that compiling four engines
# takes.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]}
KEY_BYTES = 16


@dataclass
class Times:
    """Of one prompt length and one way, in seconds and in order."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    hit: list[float] = field(default_factory=list)  # The decoder asked again.
    at_once: list[float] = field(default_factory=list)  # Both asked at the same time, another prompt.
    through_node: list[float] = field(default_factory=list)  # The same through the node.


class Pair:
    """A prefiller and a decoder."""

    def __init__(self, site: Site, way: str, longest: int, part: float, logs: Path) -> None:
        """Starts both, each with `part` of its GPU's memory."""
        self.children = []
        self.ticket: dict[str, Any] = {}  # The last one.
        for gpu in range(2):
            environment = {"CUDA_VISIBLE_DEVICES": str(gpu)}
            if way == NIXL:
                environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
                environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(vllm_engine.free_port())
            log = logs / f"{way}{gpu}.log"
            self.children.append(Child(arguments(site, way, longest, part), None, log, environment))

    def ready(self) -> None:
        """Waits for both."""
        for child in self.children:
            child.ready()

    def ask(self, prompt: list[int], times: Times) -> list[int]:
        """What is said, timed."""
        prefiller, decoder = self.children
        ticket = prefiller.ask(prompt, 1, PREFILL)
        said = decoder.ask(prompt, SAID_TOKENS, ticket.params)
        hit = decoder.ask(prompt, SAID_TOKENS)
        times.prefill.append(ticket.first_s)
        times.decode.append(said.first_s)
        times.hit.append(hit.first_s)
        self.ticket = ticket.params or {}
        if said.cached < len(prompt) - 1:
            print(f"{said.cached} of {len(prompt)} tokens came from the prefiller", file=sys.stderr)
        return said.tokens

    def ask_at_once(self, prompt: list[int], ticket: dict[str, Any]) -> float:
        """Both asked at the same time: seconds to the decoder's first token."""
        prefiller, decoder = self.children
        keys = [secrets.token_hex(KEY_BYTES)]
        prefill = prefiller.post(prompt, 1, PREFILL | {"forebay": {"keys": keys}})
        decode = decoder.post(prompt, SAID_TOKENS, chosen(ticket, keys))
        first_s = decoder.answer(decode).first_s
        prefiller.answer(prefill)
        return first_s

    def ask_through_node(self, prompt: list[int]) -> float:
        """The same, while chunks come through the node."""
        prefiller, decoder = self.children
        prefill = prefiller.post(prompt, 1, PREFILL)
        first_s = decoder.answer(decoder.post(prompt, SAID_TOKENS, AT_ONCE)).first_s
        prefiller.answer(prefill)
        return first_s


def chosen(ticket: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """What a proxy tells a decoder of a prompt that the prefiller has yet to compute."""
    ours = {name: said for name, said in ticket["forebay"].items() if name != "tokens"}
    ranks = [[rank[0], key] for rank, key in zip(ours["direct"]["ranks"], keys, strict=True)]
    ours |= {"at_once": True, "direct": ours["direct"] | {"ranks": ranks}}
    return {"do_remote_prefill": True, "forebay": ours}


def arguments(site: Site, way: str, longest: int, part: float) -> dict[str, Any]:
    """What an engine is built with."""
    given = vllm_engine.engine_arguments(site, "plain" if way == NIXL else "memory", longest + 64)
    given |= {"distributed_executor_backend": "uni", "max_num_batched_tokens": 8192}
    given["compilation_config"] = GRAPHS
    given["gpu_memory_utilization"] = part
    if way == NIXL:
        peer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cuda"}
        given["kv_transfer_config"] = peer
    else:
        given["kv_transfer_config"]["kv_connector_extra_config"]["direct_handover"] = way == DIRECT
    return given


def copy_s(runs: int) -> float:
    """Seconds that a GiB takes from GPU to GPU, contiguous, in a process that sees both."""
    code = f"""
import statistics, time, torch
one, two = (torch.empty({COPY_BYTES}, dtype=torch.uint8, device=f"cuda:{{gpu}}") for gpu in range(2))
times = []
for _ in range({runs} + 1):
    torch.cuda.synchronize(0); torch.cuda.synchronize(1)
    begun = time.perf_counter()
    two.copy_(one); torch.cuda.synchronize(0); torch.cuda.synchronize(1)
    times.append(time.perf_counter() - begun)
print(statistics.median(times[1:]))
"""
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(asked.stdout)


def measure(pairs: dict[str, Pair], sizes: list[int], runs: int) -> tuple[dict[str, dict[int, Times]], int]:
    """All prompts, and how many answers were not those of the others. A first round is not kept."""
    found = {way: {tokens: Times() for tokens in sizes} for way in pairs}
    draw, wrong = random.Random("prompts"), 0
    for run in range(runs + 1):
        for tokens in sizes:
            prompt = draw.choices(range(3, 128000), k=tokens)
            answers = {
                way: pairs[way].ask(prompt, found[way][tokens] if run > 0 else Times())
                for way in sorted(pairs, reverse=run % 2 == 1)
            }
            wrong += sum(answer != answers[next(iter(pairs))] for answer in answers.values())
            if DIRECT in pairs:
                times, pair = found[DIRECT][tokens] if run > 0 else Times(), pairs[DIRECT]
                others = [draw.choices(range(3, 128000), k=tokens) for _ in range(2)]
                times.at_once.append(pair.ask_at_once(others[0], pair.ticket))
                times.through_node.append(pair.ask_through_node(others[1]))
                # All caches are as full: vLLM takes its time to evict, and later blocks lie
                # scattered.
                for pair, other in product([pairs[way] for way in pairs if way != DIRECT], others):
                    pair.ask(other, Times())
    return found, wrong


def rows(found: dict[str, dict[int, Times]], gib_s: float, bytes_per_token: int) -> list[dict[str, Any]]:
    """The figures, in milliseconds: less is better."""
    made = []
    for tokens in next(iter(found.values())):
        hit_s = min(statistics.median(times[tokens].hit) for times in found.values())
        ceiling = 1e3 * (hit_s + gib_s * tokens * bytes_per_token / COPY_BYTES)
        name = f"{tokens // 1024}k"
        for way, of in found.items():
            suffix = "" if way == DIRECT else f".{way}"
            hits = [1e3 * one for one in of[tokens].hit]
            made.append(row(f"vllm.pd.gpu.hit_ms.{name}{suffix}", "ms", hits))
            prefill = [1e3 * one for one in of[tokens].prefill]
            made.append(row(f"vllm.pd.gpu.prefill_ms.{name}{suffix}", "ms", prefill))
            decode = row(
                f"vllm.pd.gpu.decode_ms.{name}{suffix}", "ms", [1e3 * one for one in of[tokens].decode]
            )
            decode |= {"ceiling": ceiling, "ratio": decode["value"] / ceiling}
            if way == DIRECT and NIXL in found:
                value = 1e3 * statistics.median(found[NIXL][tokens].decode)
                decode["x_peer"] = decode["value"] / value
                decode["peer"] = {"name": "NixlConnector", "version": nixl_version(), "value": value}
            made.append(decode)
        made += ttft_rows(name, found[DIRECT][tokens]) if DIRECT in found else []
    return made


def ttft_rows(name: str, times: Times) -> list[dict[str, Any]]:
    """From the first of two requests to the decoder's first token: one after the other, and at once."""
    ceiling = 1e3 * statistics.median(times.prefill)
    in_turn = [1e3 * (prefill + decode) for prefill, decode in zip(times.prefill, times.decode, strict=True)]
    made = [
        row(f"vllm.pd.gpu.ttft_ms.{name}", "ms", in_turn),
        row(f"vllm.pd.gpu.ttft_ms.{name}.at_once", "ms", [1e3 * one for one in times.at_once]),
        row(f"vllm.pd.gpu.ttft_ms.{name}.at_once.node", "ms", [1e3 * one for one in times.through_node]),
    ]
    return [one | {"ceiling": ceiling, "ratio": one["value"] / ceiling} for one in made]


def nixl_version() -> str:
    """As far as it is known."""
    try:
        return version("nixl")
    except PackageNotFoundError:
        return "unknown"


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="of the engines")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--sizes", default="2048,8192,32768")
    parser.add_argument("--ways", default=f"{DIRECT},{NIXL}", help=f"of {', '.join(WAYS)}: all fit 100 GB")
    parser.add_argument("--forebay", help="the program")
    args = parser.parse_args()
    sizes, ways = [int(size) for size in args.sizes.split(",")], args.ways.split(",")
    gib_s = copy_s(args.runs)
    with ExitStack() as ends:
        pairs: dict[str, Pair] = {}
        for way in ways:
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
            site = Site(folder, False, 12 * GIB, GIB, vllm_engine.program(args.forebay))
            ends.enter_context(vllm_engine.node_beside(site, "plain" if way == NIXL else "memory"))
            pairs[way] = Pair(site, way, max(sizes), GPU_PART / len(ways), args.logs)
            for child in pairs[way].children:
                ends.callback(child.end)
            pairs[way].ready()
            print(f"{way} is ready", file=sys.stderr, flush=True)
        found, wrong = measure(pairs, sizes, args.runs)
    made = rows(found, gib_s, site.bytes_per_token)
    made.append(row("vllm.pd.gpu.copy_gb_per_s", "GB/s", [COPY_BYTES / gib_s / 1e9]))
    made.append(row("vllm.pd.gpu.wrong_answers", "answers", [float(wrong)]))
    said = vllm_engine.results("vllm_pd_gpu", [], None, made)
    args.json.write_text(json.dumps(said, indent=2) + "\n")
    for one in made:
        ratios = f"{one.get('ratio', 0):.2f} {one.get('x_peer', '')}"
        print(f"{one['name']:36} {one['value']:8.1f} {one['unit']} {ratios}")


if __name__ == "__main__":
    main()
