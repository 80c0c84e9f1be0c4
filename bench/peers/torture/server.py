"""Servers of the stores under torture: on ports of 127.0.0.1 that are free, and gone with their worker."""

import ctypes
import signal
import socket
import subprocess

PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """Ends this process when the worker is killed, as the store that it is a part of."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(program: str, *args: str, **options: object) -> subprocess.Popen[bytes]:
    """Starts a server with `--name=value` for each option."""
    named = [f"--{name}={value}" for name, value in options.items()]
    command = [program, *args, *named]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
