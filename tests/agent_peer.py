"""The other process of the agent's tests: offers memory, and does what it is told on its standard input.

Run as a program it is that process; imported, `Peer` starts and drives it. One JSON object to a line in
each direction.
"""

import ctypes
import json
import mmap
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from processes import freeze, kill, line_of

from forebay import Agent


class Pool:
    """Memory of whole pages that is not Python's, filled with one byte."""

    def __init__(self, length: int, fill: int) -> None:
        self._map = mmap.mmap(-1, length)
        self._view = (ctypes.c_char * length).from_buffer(self._map)
        self.address = ctypes.addressof(self._view)
        self.length = length
        self.fill(fill)

    def fill(self, byte: int) -> None:
        """Sets every byte."""
        ctypes.memset(self.address, byte, self.length)

    def write(self, offset: int, data: bytes) -> None:
        """Puts bytes in."""
        ctypes.memmove(self.address + offset, data, len(data))

    def read(self, offset: int, length: int) -> bytes:
        """Takes bytes out."""
        return ctypes.string_at(self.address + offset, length)


class Peer:
    """A process with an agent `peer` and `length` bytes of memory, all of them `fill`."""

    def __init__(self, length: int, fill: int = 0, listen: str = "127.0.0.1:0") -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(length), str(fill), listen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self._answer()
        self.address = int(hello["address"])
        self.metadata = bytes.fromhex(hello["metadata"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill(self.process)

    def _answer(self) -> dict[str, Any]:
        line = line_of(self.process)
        assert line, "the peer has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Has the peer do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def freeze(self) -> None:
        """Stops the peer; returns when it has stopped."""
        freeze(self.process)

    def thaw(self) -> None:
        """Lets the peer go on."""
        self.process.send_signal(signal.SIGCONT)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the peer's memory, as the peer sees them."""
        return bytes.fromhex(self.ask("read", offset=offset, length=length)["bytes"])


def _obey(agent: Agent, pool: Pool, order: dict[str, Any]) -> dict[str, Any]:
    match order["command"]:
        case "read":
            return {"bytes": pool.read(order["offset"], order["length"]).hex()}
        case "write":
            pool.write(order["offset"], bytes.fromhex(order["bytes"]))
        case "add_peer":
            return {"name": agent.add_peer(bytes.fromhex(order["metadata"]))}
        case "notify":
            agent.notify(order["peer"], order["text"].encode())
        case "notifications":
            # With what lies in memory when they are taken: a message must not overtake its bytes.
            taken = [(sender, text.decode()) for sender, text in agent.take_notifications()]
            return {
                "notifications": taken,
                "first": pool.read(0, 1)[0],
                "last": pool.read(pool.length - 1, 1)[0],
            }
    return {}


def main() -> None:
    """The peer."""
    length, fill, listen = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pool = Pool(length, fill)
    agent = Agent("peer", listen=listen)
    agent.register_memory((pool.address, pool.length))
    print(json.dumps({"address": pool.address, "metadata": agent.metadata().hex()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_obey(agent, pool, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
