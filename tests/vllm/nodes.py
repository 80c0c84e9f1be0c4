"""Nodes in processes of their own, one or two that are peers. Knows how a node's file says so."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

BUILT = [Path(__file__).parents[2] / "target" / profile / "forebay" for profile in ("release", "debug")]


def binary() -> str:
    """The `forebay` command."""
    found = os.environ.get("FOREBAY") or next((str(path) for path in BUILT if path.exists()), None)
    if found is None:
        pytest.skip("SKIPPED: no binary: run `make build` or set FOREBAY")
    return found


class Node:
    """A node with memory alone. It is started when it is made."""

    def __init__(self, folder: Path, name: str = "node", more: str = "") -> None:
        """`more` are tables of its configuration."""
        self.socket = folder / f"{name}.sock"
        config = folder / f"{name}.toml"
        memory = "[memory]\nsize = '64MiB'\nlargest_chunk = '4MiB'\n"
        config.write_text(f"name = '{name}'\nsocket = '{self.socket}'\n{memory}{more}")
        command = [binary(), "node", "--config", str(config)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and "forebay node" in self.process.stdout.readline()

    def kill(self) -> None:
        """As a machine dies."""
        self.process.kill()
        self.process.wait()


def freeze(process: subprocess.Popen[str]) -> None:
    """Stops a child; returns when each of its threads has stopped, which can be later than the signal."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def two_peers(folder: Path) -> tuple[Node, Node]:
    """Two nodes, each of which finds chunks of the other."""
    ports = {name: free_port() for name in ("left", "right")}
    directory = folder / "nodes.toml"
    entries = [f"[[nodes]]\nname = '{name}'\naddress = '127.0.0.1:{port}'\n" for name, port in ports.items()]
    directory.write_text("".join(entries))
    left, right = (
        Node(folder, name, f"[peers]\nlisten = '127.0.0.1:{port}'\n[directory]\nfile = '{directory}'\n")
        for name, port in ports.items()
    )
    return left, right
