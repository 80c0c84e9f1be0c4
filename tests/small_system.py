"""A small Forebay on loopback: two nodes, three emulated engines, a router, and agents that use them.

Knows how each is started, where its metrics are, and how to break it. What the metrics say is for those who
start it.
"""

import mmap
import os
import re
import subprocess
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import binary, free_port, kill, line_of, start_node, until

# Engines of a node. An engine loads from the other node what that has.
NODES = {"left": ["e0", "e1"], "right": ["e2"]}
# Model seconds in a second.
CLOCK_RATIO = "8"
NODE_TOML = """name = "{name}"
socket = "{folder}/{name}.sock"
write_back = "all"
[memory]
size = "16MiB"
chunk_size = "48KiB"
[[ssd]]
path = "{folder}/{name}.log"
size = "256MiB"
[peers]
listen = "127.0.0.1:{peers}"
[directory]
file = "{folder}/nodes.toml"
[metrics]
listen = "127.0.0.1:{metrics}"
"""


@dataclass
class SmallSystem:
    """The processes, by name, and the ports of their metrics, by what they are."""

    folder: Path
    processes: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)
    ports: dict[str, dict[str, int]] = field(default_factory=dict)

    def start(self) -> None:
        """Returns when all of it can be used."""
        self.start_nodes()
        self.ports["engine"] = {}
        for node, engines in NODES.items():
            for name in engines:
                self.start_engine(name, node)
        backends = [f"{name}=http://127.0.0.1:{port}" for name, port in self.ports["engine"].items()]
        port = free_port()
        options = ["--listen", f"127.0.0.1:{port}", "--policy", "elastic", "--hand-over", "forebay"]
        options += [option for backend in backends for option in ("--backend", backend)]
        self.launch("router", ["route", *options, "--store", f"hosts={','.join(self.ports['engine'])}"])
        self.ports["router"] = {"router": port}

    def start_nodes(self) -> None:
        """Both know both from a list. The first one does not reach the second until an engine asks for it."""
        ports = {name: (free_port(), free_port()) for name in NODES}
        entry = '[[nodes]]\nname = "{}"\naddress = "127.0.0.1:{}"\n'
        listed = "".join(entry.format(name, peers) for name, (peers, _) in ports.items())
        (self.folder / "nodes.toml").write_text(listed)
        for name, (peers, metrics) in ports.items():
            config = self.folder / f"{name}.toml"
            config.write_text(NODE_TOML.format(name=name, folder=self.folder, peers=peers, metrics=metrics))
            self.processes[name] = start_node(config)
        self.ports["node"] = {name: metrics for name, (_, metrics) in ports.items()}

    def start_engine(self, name: str, node: str) -> None:
        """An emulated engine that keeps its KV in a node, with a pool that is soon full."""
        options = ["--port", "0", "--model", "small", "--node", str(self.folder / f"{node}.sock")]
        options += ["--clock-ratio", CLOCK_RATIO, "--pool-tokens", "60000"]
        said = self.launch(name, ["engine", *options])
        found = re.search(r"http://127\.0\.0\.1:(\d+)", said)
        assert found, said
        self.ports["engine"][name] = int(found[1])

    def launch(self, name: str, command: list[str]) -> str:
        """Starts a process that says a line when it can be used."""
        whole = [binary(), "--end-with", str(os.getpid()), *command]
        self.processes[name] = subprocess.Popen(whole, stdout=subprocess.PIPE, text=True)
        return line_of(self.processes[name])

    def start_agents(self) -> None:
        """Sessions of agents, until all is stopped. Returns when the nodes have reached each other."""
        trace = self.folder / "trace.jsonl"
        generate = [binary(), "trace", "generate", "--preset", "demo", "--out", str(trace)]
        subprocess.run(generate, check=True, capture_output=True, timeout=60)
        router = self.ports["router"]["router"]
        replay = [binary(), "trace", "replay", str(trace), "--target", f"http://127.0.0.1:{router}"]
        replay += ["--model", "small", "--clock-ratio", CLOCK_RATIO, "--max-failures", "1000"]
        replay += ["--log", str(self.folder / "replay.jsonl")]
        self.processes["agents"] = subprocess.Popen(replay, stdout=subprocess.DEVNULL)
        until(lambda: "forebay_peer_unreached{" not in self.pages("node"))

    def page(self, kind: str, name: str) -> str:
        """What a process shows at /metrics."""
        url = f"http://127.0.0.1:{self.ports[kind][name]}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return str(answer.read().decode())

    def pages(self, kind: str) -> str:
        """What all processes of a kind show."""
        return "\n".join(self.page(kind, name) for name in self.ports[kind])

    def kill(self, name: str) -> None:
        """As a machine dies."""
        kill(self.processes.pop(name))

    def spoil_disk(self, name: str) -> None:
        """Overwrites what a node has on its SSD, behind the log's superblocks.

        Past the page cache, as the node goes: what lies in the cache meanwhile cannot be written back.
        """
        zeros = mmap.mmap(-1, 1 << 20)
        log = os.open(self.folder / f"{name}.log", os.O_WRONLY | os.O_DIRECT)
        try:
            end = os.lseek(log, 0, os.SEEK_END)
            for place in range(1 << 20, end, len(zeros)):
                os.pwrite(log, zeros, place)
        finally:
            os.close(log)

    def stop(self) -> None:
        """Ends all of it."""
        for name in list(self.processes):
            self.kill(name)
