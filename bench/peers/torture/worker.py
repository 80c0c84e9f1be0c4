"""What the torture workers of other projects' stores share: the loop of docs/torture.md's protocol.

A worker is a script that derives `Store` and calls `serve`. Nothing is injected below these stores, because
their I/O is native or in other processes; the suite changes their files.
"""

import json
import os
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol

COMMANDS_MAX = 64


class Refused(Exception):
    """The store declines in a way that its interface documents, and is as before."""


class Store(Protocol):
    """A store that is open. Methods are called from up to 64 threads at a time."""

    def put(self, key: int, value: bytes) -> None:
        """Stores a value and returns when it is written where a lookup finds it."""

    def get_many(self, keys: list[int]) -> list[bytes | None]:
        """Reads values with one call of the store."""

    def delete(self, key: int) -> None:
        """Forgets a value."""

    def flush(self) -> None:
        """Waits for what the store still has to write."""

    def close(self) -> None:
        """Closes the store in an orderly way."""


Answer = tuple[dict[str, Any], bytes]


def carry_out(store: Store, command: dict[str, Any], payload: bytes) -> Answer:
    """The answer of an open store to a command, and its payload."""
    match command["do"]:
        case "put":
            store.put(command["key"], payload)
        case "get":
            [value] = store.get_many([command["key"]])
            return ({"is": "miss"}, b"") if value is None else ({"is": "hit"}, value)
        case "get_many":
            values = store.get_many(command["keys"])
            lengths = [None if value is None else len(value) for value in values]
            return {"is": "many", "lengths": lengths}, b"".join(value for value in values if value)
        case "delete":
            store.delete(command["key"])
        case "flush":
            store.flush()
        case "close":
            store.close()
        case unknown:
            return {"is": "unsupported", "reason": f"no command {unknown}"}, b""
    return {"is": "done"}, b""


class Worker:
    """Answers commands, also before the store is open."""

    def __init__(self, opens: Callable[[dict[str, Any]], Store], answers: BinaryIO) -> None:
        self.opens, self.answers = opens, answers
        self.store: Store | None = None
        self.lock = threading.Lock()

    def carry_out(self, command: dict[str, Any], payload: bytes) -> Answer:
        """The answer to a command, and its payload."""
        match command["do"]:
            case "inject":
                return {"is": "unsupported", "reason": "its I/O is out of the worker's reach"}, b""
            case "stat":
                return {"is": "stat", "faults": None, "played": None}, b""
            case "open":
                self.store = self.opens(command)
                return {"is": "done"}, b""
        if self.store is None:
            return {"is": "error", "reason": "the store is not open"}, b""
        return carry_out(self.store, command, payload)

    def answer(self, command: dict[str, Any], payload: bytes) -> None:
        """Carries out a command and writes its answer; an exception is one, too."""
        value = b""
        try:
            header, value = self.carry_out(command, payload)
        except Refused as refused:
            header = {"is": "refused", "reason": str(refused)}
        except Exception as error:
            traceback.print_exc()
            header = {"is": "error", "reason": f"{type(error).__name__}: {error}"[:300]}
        text = json.dumps({"id": command["id"], "bytes": len(value), **header}).encode()
        with self.lock:
            self.answers.write(struct.pack("<I", len(text)) + text + value)
            self.answers.flush()


def work(opens: Callable[[dict[str, Any]], Store], commands: BinaryIO, answers: BinaryIO) -> None:
    """Answers commands until `close` or their end; all but `open` and `close` side by side."""
    worker = Worker(opens, answers)
    with ThreadPoolExecutor(COMMANDS_MAX) as pool:
        while length := commands.read(4):
            command = json.loads(commands.read(*struct.unpack("<I", length)))
            payload = commands.read(command["bytes"])
            if command["do"] in ("open", "close"):
                worker.answer(command, payload)
            else:
                pool.submit(worker.answer, command, payload)
            if command["do"] == "close":
                break


def serve(opens: Callable[[dict[str, Any]], Store]) -> None:
    """Is the worker of a store that `opens` opens from the fields of the command `open`."""
    # Whatever the store's libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work(opens, sys.stdin.buffer, answers)
    answers.flush()
    # Threads of the store's libraries do not hold the process.
    os._exit(0)
