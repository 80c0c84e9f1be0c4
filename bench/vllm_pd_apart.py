#!/usr/bin/env python3
"""Time to the first token of a prompt that is computed on one host and decoded on another, over a slow link.

    unshare -n sh -c 'ip link set lo up &&
        tc qdisc add dev lo root tbf rate 100mbit burst 256kb latency 50ms &&
        exec PYTHON bench/vllm_pd_apart.py --json FILE'

A prefiller and a decoder on a processor each, with nodes of their own that are peers, and loopback as slow
as it was made. Whoever asks carries the prefiller's ticket to the decoder, or asks both at once: then chunks
come while others are still computed. Both ways take turns, with prompts that nobody has seen. What is said
must be the same whoever computes it. Knows what is measured and how rows are made of it; engines are
`vllm_child`'s and `vllm_engine`'s.
"""

import contextlib
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_child import Child
from vllm_engine import GIB, Node, Site, row
from vllm_pd import AT_ONCE, BLOCKS, PREFILL, SAID_TOKENS, options, write

SIZES = (1500, 4000)
STEP_TOKENS = 512  # Of a prompt: chunks are there when the step that computes them ends.
WAYS = ("", ".at_once")


@dataclass(frozen=True)
class Side(Site):
    """One of the hosts. Both have the same model."""

    name: str = "left"

    @property
    def socket(self) -> Path:
        """Where its node answers."""
        return self.folder / f"{self.name}.sock"

    def start(self, processor: int) -> Child:
        """Its engine."""
        given = vllm_engine.engine_arguments(self, "memory", max(SIZES) + 64)
        given |= {"distributed_executor_backend": "uni", "max_num_batched_tokens": STEP_TOKENS}
        given |= {"num_gpu_blocks_override": BLOCKS}
        return Child(given, processor, self.folder / f"{self.name}.log")


@dataclass
class Times:
    """Of one prompt length, in seconds and in order."""

    ttft: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    prefill: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)


def sides(folder: Path, program: str) -> list[Side]:
    """Both hosts."""
    return [Side(folder, True, GIB, 0, program, name) for name in ("left", "right")]


@contextlib.contextmanager
def peers(both: list[Side]) -> Iterator[None]:
    """A node on each, which finds what the other one has."""
    folder = both[0].folder
    addresses = {side.name: f"127.0.0.1:{vllm_engine.free_port()}" for side in both}
    entries = [f'[[nodes]]\nname = "{name}"\naddress = "{at}"\n' for name, at in addresses.items()]
    (folder / "nodes.toml").write_text("".join(entries))
    with contextlib.ExitStack() as ends:
        for side in both:
            listen = ["[peers]", f'listen = "{addresses[side.name]}"']
            node = Node(side, disk=False, more=[*listen, "[directory]", f'file = "{folder}/nodes.toml"'])
            ends.callback(node.stop)
        yield


def over_the_link(size: int) -> float:
    """Seconds of a plain socket for so many bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with server.accept()[0] as one:
                one.sendall(bytes(size))

        sender = threading.Thread(target=send)
        sender.start()
        begun = time.perf_counter()
        with socket.create_connection(server.getsockname()) as one:
            while one.recv(1 << 20):
                pass
        sender.join()
        return time.perf_counter() - begun


def ask(prefiller: Child, decoder: Child, prompt: list[int], way: str) -> tuple[float, list[int]]:
    """Seconds to the decoder's first token, and what it says."""
    begun = prefiller.post(prompt, 1, PREFILL)
    if way:
        said = decoder.answer(decoder.post(prompt, SAID_TOKENS, AT_ONCE))
        prefiller.answer(begun)
        first_s = said.first_s
    else:
        ticket = prefiller.answer(begun)
        said = decoder.ask(prompt, SAID_TOKENS, ticket.params)
        first_s = ticket.first_s + said.first_s
    if said.cached < len(prompt) - 1:
        sys.exit(f"{len(prompt)} tokens{way}: {said.cached} came from the prefiller")
    return first_s, said.tokens


def measure(both: list[Side], runs: int) -> dict[int, Times]:
    """All prompts. A first round is for connections and is not kept."""
    engines = [side.start(processor) for processor, side in enumerate(both)]
    try:
        for engine in engines:
            engine.ready()
        found = {tokens: Times() for tokens in SIZES}
        draw = random.Random("prompts")
        for run in range(runs + 1):
            print(f"round {run} of {runs}", file=sys.stderr, flush=True)
            for tokens in SIZES:
                times = found[tokens] if run > 0 else Times()
                for way in WAYS if run % 2 else reversed(WAYS):
                    prompt = draw.choices(range(3, both[0].model["vocab_size"]), k=tokens)
                    first_s, said = ask(engines[0], engines[1], prompt, way)
                    times.ttft[way].append(first_s)
                    if engines[0].ask(prompt, SAID_TOKENS).tokens != said:
                        sys.exit(f"{tokens} tokens{way}: the answer is not that of the prefiller")
                alone = draw.choices(range(3, both[0].model["vocab_size"]), k=tokens)
                times.prefill.append(engines[0].ask(alone, 1).first_s)
                times.link.append(over_the_link(tokens * both[0].bytes_per_token))
        return found
    finally:
        for engine in engines:
            engine.end()


def rows(found: dict[int, Times]) -> Iterator[dict[str, Any]]:
    """The ceiling is what computing and the link take, one after the other; at once, the longer of both."""
    for tokens, times in found.items():
        yield row(f"vllm.pd.apart.prefill_s.{tokens}", "s", times.prefill)
        yield row(f"vllm.pd.apart.link_s.{tokens}", "s", times.link)
        prefill_s, link_s = statistics.median(times.prefill), statistics.median(times.link)
        for way, ceiling_s in zip(WAYS, (prefill_s + link_s, max(prefill_s, link_s)), strict=True):
            one = row(f"vllm.pd.apart.ttft_s.{tokens}{way}", "s", times.ttft[way])
            yield one | {"ceiling": ceiling_s, "ratio": one["value"] / ceiling_s}


def main() -> None:
    """All of it."""
    args, load = options(__doc__), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        both = sides(Path(folder), vllm_engine.program(args.forebay))
        with peers(both):
            made = list(rows(measure(both, args.runs)))
    write(args.json, "vllm_pd_apart", made, load)
    for one in made:
        print(f"{one['name']:40} {1e3 * one['value']:8.1f} ms {one.get('ratio', '')}")


if __name__ == "__main__":
    main()
