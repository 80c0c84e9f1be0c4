#!/usr/bin/env python3
"""SGLang's HiCache on its own file back end and on a node, in one server, in turns.

    FOREBAY=PROGRAM .venv-sglang/bin/python bench/sglang.py --dir FOLDER [--rounds 7] [--json FILE]

It is the real server on the CPU, as `make test-sglang` installs it. The model is tiny, and its KV is as large
as that of Llama 3 8B: 128 KiB a token. In each round each back end is attached to the same server, and gets a
prompt that no one has seen: it is computed and stored. Then SGLang forgets it, and it comes back from memory
(of the node, or the page cache of the files), and then from the SSD (the node was started again; the files
left the page cache). All tokens are those that HiCache without storage says. What was read is compared with
what the system counted. Knows `tests/sglang`'s server and node.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests/sglang"), str(ROOT / "tests/vllm"), str(ROOT / "tests")]

from processes import until  # noqa: E402
from sglang_node import Node  # noqa: E402
from sglang_server import HICACHE, PAGE_TOKENS, Said, Server, ours  # noqa: E402
from tiny_model import VOCABULARY, write_tokenizer  # noqa: E402
from vllm_engine import results, row  # noqa: E402

LAYERS, HEADS, HEAD, WIDTH, INNER = 16, 8, 128, 256, 512
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD * 4
PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES
ROOM_TOKENS = 4096
"""Of the device's pool. The host pool has twice as many."""
COUNT = 8
"""Tokens that are asked for."""
READ_RATIO = 0.9
"""Of the bytes of a prompt, what the disk must have read where it comes from the SSD."""


def make_model(folder: Path) -> str:
    """Writes the model; returns what identifies its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        max_position_embeddings=ROOM_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    write_tokenizer(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def process_cpu_s(pid: int) -> float:
    """Processor time of a process: its clock has a number that follows from its own."""
    return time.clock_gettime((~pid << 3) | 2)


def main_thread_cpu_s(pid: int) -> float:
    """Processor time of the first thread of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def disk_read_bytes(pid: int) -> int:
    """What a process has had the disk read."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def scheduler_of(server: Server) -> int:
    """The process of a server that has the caches."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(server.process.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in listed.stdout.splitlines() if "scheduler" in line]
    return int(line.split()[0])


@dataclass
class Files:
    """SGLang's own back end."""

    folder: Path
    pids: list[int] = field(default_factory=list)

    def attach(self, server: Server) -> None:
        """Has SGLang use it."""
        server.attach("file", {"file_storage_path": str(self.folder)})

    def send_to_disk(self, pages: int) -> None:
        """Has all files written, and leave the page cache. There are so many."""
        assert len(list(self.folder.iterdir())) == pages
        for path in self.folder.iterdir():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


@dataclass
class Pages:
    """A node."""

    node: Node
    weights: str

    @property
    def pids(self) -> list[int]:
        """The processes beside the server's."""
        return [self.node.process.pid]

    def attach(self, server: Server) -> None:
        """Has SGLang use it."""
        server.attach("dynamic", ours(self.node.socket, self.weights))

    def send_to_disk(self, pages: int) -> None:
        """Has all pages written, and starts the node again. There are so many."""
        self.node.written(pages)
        self.node.restart()


@dataclass
class Turn:
    """What came of one request."""

    said: Said
    cpu_ms: float  # Of all threads but the scheduler's own, which spins, and of the node.
    read_bytes: int


@dataclass
class Bench:
    """A server, and what it may keep pages in."""

    server: Server
    ways: dict[str, Any]
    tokens: int
    scheduler: int = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = scheduler_of(self.server)

    def prompt(self, number: int) -> list[int]:
        """Tokens that follow from the number."""
        return random.Random(number).choices(range(3, VOCABULARY), k=self.tokens)

    def turn(self, way: Any, prompt: list[int], ended: Callable[[], bool] | None = None) -> Turn:
        """A request, until its answer is there, and what follows from it, too."""
        cpu, read = self.cpu_s(way), self.read_bytes(way)
        said = self.server.generate(prompt, COUNT)
        if ended:
            until(ended)
        return Turn(said, 1e3 * (self.cpu_s(way) - cpu), self.read_bytes(way) - read)

    def cpu_s(self, way: Any) -> float:
        """Processor time of what moves pages."""
        moving = process_cpu_s(self.scheduler) - main_thread_cpu_s(self.scheduler)
        return moving + sum(process_cpu_s(pid) for pid in way.pids)

    def read_bytes(self, way: Any) -> int:
        """What the disk has read for them."""
        return sum(disk_read_bytes(pid) for pid in [self.scheduler, *way.pids])

    def round(self, way: Any, number: int, right: list[int]) -> dict[str, Turn]:
        """One prompt: computed and stored, from memory, from the SSD."""
        server, prompt, whole = self.server, self.prompt(number), self.tokens // PAGE_TOKENS
        way.attach(server)
        server.flush()
        stored = server.counter("sglang:backuped_tokens_total") + whole * PAGE_TOKENS
        found = {"store": self.turn(way, prompt, lambda: self.is_stored(stored))}
        server.flush()
        found["memory"] = self.turn(way, prompt)
        way.send_to_disk((number + 1) * whole)
        server.flush()
        found["ssd"] = self.turn(way, prompt)
        server.flush()
        server.detach()
        for name, turn in found.items():
            said = turn.said
            assert said.tokens == right, f"{name}: other tokens"
            from_storage = 0 if name == "store" else whole * PAGE_TOKENS
            assert said.cached == said.storage == from_storage, f"{name}: {said}"
        size = whole * PAGE_BYTES
        assert found["ssd"].read_bytes > READ_RATIO * size, "it was not on the SSD"
        assert found["memory"].read_bytes < (1 - READ_RATIO) * size, "it was not in memory"
        return found

    def is_stored(self, tokens: float) -> bool:
        """Whether the storage has had so many tokens since the server's start."""
        time.sleep(0.02)
        return self.server.counter("sglang:backuped_tokens_total") >= tokens


def measured(bench: Bench, rounds: int) -> tuple[list[Said], dict[str, list[dict[str, Turn]]]]:
    """All rounds, after one that does not count. In each, who is first is drawn."""
    plain: list[Said] = []
    found: dict[str, list[dict[str, Turn]]] = {name: [] for name in bench.ways}
    order = random.Random(1)
    for number in range(rounds + 1):
        bench.server.flush()
        said = bench.server.generate(bench.prompt(number), COUNT)
        assert said.cached == 0
        turns = {
            name: bench.round(bench.ways[name], number, said.tokens)
            for name in order.sample(list(bench.ways), len(bench.ways))
        }
        if number:
            plain.append(said)
            for name, turn in turns.items():
                found[name].append(turn)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return plain, found


def rows_of(plain: list[Said], found: dict[str, list[dict[str, Turn]]]) -> list[dict[str, Any]]:
    """A row for each figure of ours, with the file back end's as its peer."""
    rows = [row("sglang.ttft_ms.computed", "ms", [1e3 * said.first_token_s for said in plain])]

    def add(name: str, unit: str, figure: Callable[[Turn], float], state: str) -> None:
        values = {way: [figure(turns[state]) for turns in rounds] for way, rounds in found.items()}
        theirs = statistics.median(values["file"])
        peer = {"name": "HiCacheFile", "version": sglang_version(), "value": theirs}
        peer |= {"min": min(values["file"]), "max": max(values["file"])}
        ratios = [one / other for one, other in zip(values["file"], values["forebay"], strict=True)]
        more = {"peer": peer, "peer_to_ours": statistics.median(ratios)}
        more |= {"peer_to_ours_min": min(ratios), "peer_to_ours_max": max(ratios)}
        rows.append(row(f"{name}.{state}", unit, values["forebay"], **more))

    for state in ("store", "memory", "ssd"):
        add("sglang.ttft_ms", "ms", lambda turn: 1e3 * turn.said.first_token_s, state)
        if state != "store":
            add("sglang.wait_ms", "ms", lambda turn: 1e3 * turn.said.storage_wait_s, state)
        add("sglang.cpu_ms", "ms", lambda turn: turn.cpu_ms, state)
    return rows


def sglang_version() -> str:
    """Of the SGLang of this Python."""
    from importlib.metadata import version

    return version("sglang")


def run(folder: Path, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Starts all that is needed, measures, and ends it."""
    model, files = folder / "model", folder / "files"
    model.mkdir()
    files.mkdir()
    weights = make_model(model)
    size_mib = (rounds + 1) * tokens * TOKEN_BYTES >> 20
    page = f"{PAGE_BYTES >> 20}MiB"
    node = Node(folder, memory=f"{size_mib + 256}MiB", disk=f"{2 * size_mib + 1024}MiB", page=page)
    server = Server(sys.executable, model, folder / "server.log", [*HICACHE], room_tokens=ROOM_TOKENS)
    try:
        server.wait()
        bench = Bench(server, {"file": Files(files), "forebay": Pages(node, weights)}, tokens)
        return rows_of(*measured(bench, rounds))
    finally:
        server.kill()
        node.kill()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="on the disk that has the log and the files")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024 + 1, help="of a prompt")
    parser.add_argument("--disk", default="virtual", help="its name, for the results")
    parser.add_argument("--json", type=Path, help="where the results go")
    args = parser.parse_args()
    if args.tokens % PAGE_TOKENS != 1:
        parser.error(f"--tokens are pages of {PAGE_TOKENS} and one more: the last one is always computed")
    load_before = os.getloadavg()[0]
    # SGLang's own threads of computation would take the processor that moves pages.
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="sglang-"))
    try:
        rows = run(folder, args.tokens, args.rounds)
    finally:
        shutil.rmtree(folder)
    rows = [each | {"load_average": round(load_before, 1)} for each in rows]
    for each in rows:
        print(json.dumps(each))
    if args.json:
        said = results("sglang", [], args.disk, rows)
        args.json.write_text(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    main()
