"""Processes for engines, forked from one that has imported vLLM: that takes most of an engine's start.

It knows how such a process is asked for, and how it ends. What runs in it is `driver.main`. The tests import
this file to ask for processes; the Python that has vLLM runs it to make them. Who forks must have one thread,
which is looked at each time.
"""

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock

# What an engine on a CPU needs.
IMPORTS = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "forebay.vllm.connector",
    "driver",
)


class Forked:
    """A process, with as much of `subprocess.Popen` as engines need."""

    def __init__(self, pid: int, handle: int, stdin: int, stdout: int) -> None:
        self.pid, self.handle = pid, handle
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        ended, _, _ = select.select([self.handle], [], [], timeout)
        if not ended:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)


class Parent:
    """The process that has imported vLLM. It starts when it is needed, and ends when this one does."""

    def __init__(self, python: str, environment: dict[str, str]) -> None:
        self.python, self.environment = python, environment
        self.socket: socket.socket | None = None
        self.lock = Lock()

    def fork(self, log: Path) -> Forked:
        """Another process, whose errors go to this log."""
        stdin, ours_in = os.pipe()
        ours_out, stdout = os.pipe()
        with log.open("ab") as errors, self.lock:
            self.socket = self.socket or self.start(errors.fileno())
            socket.send_fds(self.socket, [b"fork"], [stdin, stdout, errors.fileno()])
            said, handles, *_ = socket.recv_fds(self.socket, 64, 1)
        os.close(stdin)
        os.close(stdout)
        assert said, f"the process that imports vLLM has died: {log.read_text(errors='replace')[-3000:]}"
        return Forked(int(said), handles[0], ours_in, ours_out)

    def start(self, errors: int) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [self.python, __file__, str(theirs.fileno())]
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=self.environment,
                pass_fds=[theirs.fileno()],
            )
        return ours


def main() -> None:
    """Forks until nobody can ask any more. In a child it returns when the engine has ended."""
    ask = socket.socket(fileno=int(sys.argv[1]))
    *_, driver = map(importlib.import_module, IMPORTS)
    while True:
        said, fds, *_ = socket.recv_fds(ask, 64, 3)
        if not said:
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"{threads} threads: a fork would lose all but one"
        child = os.fork()
        if child == 0:
            ask.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            driver.main()
            return
        for fd in fds:
            os.close(fd)
        handle = os.pidfd_open(child)
        socket.send_fds(ask, [str(child).encode()], [handle])
        os.close(handle)


if __name__ == "__main__":
    main()
