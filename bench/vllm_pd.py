#!/usr/bin/env python3
"""Time to the first token of a prompt that one vLLM computes and another decodes: ours beside NIXL's.

    bench/vllm_pd.py --json FILE

On one host without GPUs: a prefiller and a decoder for each connector and one vLLM alone, all in processes
of their own, the two of a pair on a processor each. Whoever asks carries `kv_transfer_params` from one to the
other, as a proxy does. All are asked for each prompt, which nobody has seen, one after the other and the
connectors in turns. What is said must be what the one alone says. Knows what is measured and how rows are
made of it; engines are `vllm_child`'s and `vllm_engine`'s.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vllm_child
import vllm_engine
from vllm_child import Child
from vllm_engine import GIB, Node, Site, row

SIZES = (512, 1500, 4000)
RUNS = 7
SAID_TOKENS = 8
BLOCKS = 1024
THAW_S = 0.05
OURS, PEER = "forebay", "nixl"
# What a proxy asks a prefiller for.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
AT_ONCE = {"do_remote_prefill": True}  # To a decoder that is asked while the prefiller computes.
ON_LOOPBACK = {
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}


@dataclass
class Times:
    """Of one prompt length and one connector, in seconds and in order."""

    ttft: list[float] = field(default_factory=list)  # From posting to the prefiller to the decoder's token.
    decode: list[float] = field(default_factory=list)  # From posting to the decoder on.
    cpu: list[float] = field(default_factory=list)  # Of all processes, to the end of the answer.
    cached: list[int] = field(default_factory=list)  # Tokens that the decoder did not compute.


class Pair:
    """A prefiller and a decoder."""

    def __init__(self, site: Site, name: str, node: Node | None) -> None:
        """Starts both."""
        self.node = node
        self.children = [
            Child(arguments(site, name), number, site.folder / f"{name}{number}.log", environment(name))
            for number in range(2)
        ]

    def freeze(self) -> None:
        """Until it is asked again. NIXL's threads poll: nobody could be measured beside them."""
        for child in self.children:
            os.killpg(child.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """It can be asked."""
        for child in self.children:
            os.killpg(child.process.pid, signal.SIGCONT)
        time.sleep(THAW_S)

    def cpu_s(self) -> float:
        """Processor time so far, of the node too."""
        node_s = 0.0 if self.node is None else vllm_child.process_cpu_s(self.node.process.pid)
        return node_s + sum(child.cpu_s() for child in self.children)

    def ask(self, prompt: list[int], times: Times) -> list[int]:
        """What is said, timed."""
        prefiller, decoder = self.children
        before_s = self.cpu_s()
        ticket = prefiller.ask(prompt, 1, PREFILL)
        said = decoder.ask(prompt, SAID_TOKENS, ticket.params)
        times.ttft.append(ticket.first_s + said.first_s)
        times.decode.append(said.first_s)
        times.cpu.append(self.cpu_s() - before_s)
        times.cached.append(said.cached)
        return said.tokens


def arguments(site: Site, name: str) -> dict[str, Any]:
    """What an engine is built with."""
    way = "memory" if name == OURS else "plain"
    given = vllm_engine.engine_arguments(site, way, max(SIZES) + 64)
    given |= {"distributed_executor_backend": "uni", "max_num_batched_tokens": max(SIZES)}
    given["num_gpu_blocks_override"] = BLOCKS
    if name == PEER:
        peer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        given["kv_transfer_config"] = peer
    return given


def environment(name: str) -> dict[str, str]:
    """What an engine of a connector is told besides."""
    if name != PEER:
        return {}
    return ON_LOOPBACK | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(vllm_engine.free_port())}


def measure(site: Site, node: Node, runs: int) -> tuple[dict[str, dict[int, Times]], dict[int, list[float]]]:
    """All prompts. A first round is for handshakes and is not kept."""
    plain = Child(arguments(site, "plain"), 0, site.folder / "plain.log")
    pairs = {OURS: Pair(site, OURS, node), PEER: Pair(site, PEER, None)}
    everyone = [plain, *(child for pair in pairs.values() for child in pair.children)]
    try:
        for child in everyone:
            child.ready()
        pairs[PEER].freeze()
        found = {name: {tokens: Times() for tokens in SIZES} for name in pairs}
        alone: dict[int, list[float]] = {tokens: [] for tokens in SIZES}
        draw = random.Random("prompts")
        for run in range(runs + 1):
            print(f"round {run} of {runs}", file=sys.stderr, flush=True)
            for tokens in SIZES:
                prompt = draw.choices(range(3, site.model["vocab_size"]), k=tokens)
                said = plain.ask(prompt, SAID_TOKENS)
                if run > 0:
                    alone[tokens].append(said.first_s)
                for name in sorted(pairs, reverse=run % 2 == 1):
                    times = found[name][tokens] if run > 0 else Times()
                    pairs[name].thaw()
                    answer = pairs[name].ask(prompt, times)
                    if name == PEER:
                        pairs[name].freeze()
                    if answer != said.tokens:
                        sys.exit(f"{name}: {tokens} tokens: the answer is not that of one vLLM alone")
                    if times.cached[-1] < tokens - 1:
                        sys.exit(f"{name}: {tokens} tokens: {times.cached[-1]} came from the prefiller")
        return found, alone
    finally:
        pairs[PEER].thaw()
        for child in everyone:
            child.end()


def rows(found: dict[str, dict[int, Times]], alone: dict[int, list[float]]) -> list[dict[str, Any]]:
    """The ceiling is the prompt computed by one vLLM alone: less is better."""
    made = []
    for tokens, ceiling_s in alone.items():
        made.append(row(f"vllm.pd.prefill_s.{tokens}", "s", ceiling_s))
        floor_s = statistics.median(ceiling_s)
        for name in (OURS, PEER):
            suffix = "" if name == OURS else f".{name}"
            times, theirs = found[name][tokens], found[PEER][tokens]
            ttft = row(f"vllm.pd.ttft_s.{tokens}{suffix}", "s", times.ttft)
            ttft |= {"ceiling": floor_s, "ratio": ttft["value"] / floor_s}
            ttft["cpu_s"] = statistics.median(times.cpu)
            decode = row(f"vllm.pd.decode_s.{tokens}{suffix}", "s", times.decode)
            if name == OURS:
                for one, peer_s in ((ttft, theirs.ttft), (decode, theirs.decode)):
                    value = statistics.median(peer_s)
                    one["x_peer"] = one["value"] / value
                    one["peer"] = {"name": "NixlConnector", "version": version("nixl"), "value": value}
            made += [ttft, decode]
    return made


def options(doc: str) -> argparse.Namespace:
    """The command line, also of `vllm_pd_apart`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--forebay", help="the program")
    return parser.parse_args()


def write(out: Path, bench: str, made: list[dict[str, Any]], load: float) -> None:
    """The results, with the load of the machine before."""
    said = vllm_engine.results(bench, [], None, made)
    said["machine"]["load_before"] = round(load, 2)
    out.write_text(json.dumps(said, indent=2) + "\n")


def main() -> None:
    """All of it."""
    args, load = options(__doc__), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), True, GIB, GIB, vllm_engine.program(args.forebay))
        with vllm_engine.node_beside(site, "memory") as node:
            assert node is not None
            made = rows(*measure(site, node, args.runs))
    write(args.json, "vllm_pd", made, load)
    for one in made:
        print(f"{one['name']:32} {1e3 * one['value']:8.1f} ms {one.get('x_peer', '')}")


if __name__ == "__main__":
    main()
