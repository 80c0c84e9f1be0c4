"""Processes that tests start, and how long they are waited for.

Knows where the `forebay` command is. Nodes that are started here end with the tests, however these end.
Nothing waits without a limit, and limits are so long that no slow machine comes near them.
"""

import os
import pathlib
import random
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

BUILT = [
    pathlib.Path(__file__).parents[1] / "target" / profile / "forebay" for profile in ("release", "debug")
]
TIMEOUT_S = 240.0
# Below those that a system gives to whoever asks for any: nobody gets one between choosing and
# binding it.
PORTS = range(10_000, 16_000)


def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Waits for it."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


def binary() -> str:
    """The `forebay` command."""
    found = os.environ.get("FOREBAY") or next((str(path) for path in BUILT if path.exists()), None)
    if found is None:
        pytest.skip("SKIPPED: no binary: run `make build` or set FOREBAY")
    return found


def start_node(config: pathlib.Path) -> subprocess.Popen[str]:
    """A node that takes connections. It ends with the thread that calls this, so that is a test's own."""
    command = [binary(), "--end-with", str(os.getpid()), "node", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "forebay node" in line_of(process), "the node has ended"
    return process


def line_of(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> str:
    """The next line that a process prints, empty at its end. It prints one whenever it is told to."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert ready, f"process {process.pid} says nothing"
    return process.stdout.readline()


def kill(process: subprocess.Popen[Any] | None) -> None:
    """As a machine dies."""
    if process is not None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def freeze(process: subprocess.Popen[str]) -> None:
    """Stops a child; returns when each of its threads has stopped, which can be later than the signal."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def free_port() -> int:
    """A port of loopback that nobody has now."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


@dataclass
class Daemon:
    """A node in a process of its own."""

    folder: pathlib.Path
    process: subprocess.Popen[str] | None = None

    @property
    def socket(self) -> pathlib.Path:
        return self.folder / "node.sock"

    def start(self) -> None:
        config = self.folder / "node.toml"
        config.write_text(f"socket = '{self.socket}'\n[memory]\nsize = '16MiB'\nlargest_chunk = '1MiB'\n")
        self.process = start_node(config)

    def kill(self) -> None:
        kill(self.process)
