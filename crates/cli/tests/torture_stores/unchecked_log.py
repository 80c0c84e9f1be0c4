#!/usr/bin/env python3
"""A store without a checksum, for the suite to find out: values in slots, records of 32 bytes in an index.

A record says whose value lies in which slot. Neither says anything of the other.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

RECORD = struct.Struct("<QQQQ")


class Log:
    """An open log and its index."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.bytes = setup["value_bytes"]
        self.log, self.index = (Path(setup["dir"]) / name for name in ("log", "index"))
        for file in (self.log, self.index):
            file.touch()
        records = RECORD.iter_unpack(self.index.read_bytes())
        self.slots = {key: slot for key, (_, slot, _, is_there) in enumerate(records) if is_there}
        free = range(setup["capacity_bytes"] // self.bytes)
        self.free = set(free) - set(self.slots.values())

    def note(self, key: int, slot: int, is_there: int) -> None:
        """Overwrites the record of a key."""
        with self.index.open("r+b") as index:
            index.seek(key * RECORD.size)
            index.write(RECORD.pack(key, slot, self.bytes, is_there))

    def put(self, key: int, value: bytes) -> None:
        """Stores a value in the first slot that is free."""
        slot = self.slots[key] = min(self.free)
        self.free.remove(slot)
        with self.log.open("r+b") as log:
            log.seek(slot * self.bytes)
            log.write(value)
        self.note(key, slot, 1)

    def get(self, key: int) -> bytes | None:
        """Whatever lies in the slot of a key."""
        if key not in self.slots:
            return None
        with self.log.open("rb") as log:
            log.seek(self.slots[key] * self.bytes)
            return log.read(self.bytes)

    def delete(self, key: int) -> None:
        """Gives a slot back."""
        if key in self.slots:
            self.free.add(self.slots.pop(key))
            self.note(key, 0, 0)


def main() -> None:
    """Serves until `close`."""
    log: Log | None = None
    while length := sys.stdin.buffer.read(4):
        command = json.loads(sys.stdin.buffer.read(*struct.unpack("<I", length)))
        payload, values, answer = sys.stdin.buffer.read(command["bytes"]), b"", {"is": "done"}
        match command["do"], log:
            case "open", _:
                log = Log(command)
            case "put", Log():
                log.put(command["key"], payload)
            case "get", Log():
                value = log.get(command["key"])
                answer, values = {"is": "miss" if value is None else "hit"}, value or b""
            case "delete", Log():
                log.delete(command["key"])
            case "inject", _:
                answer = {"is": "unsupported", "reason": "no file layer"}
            case "stat", _:
                answer = {"is": "stat", "faults": None}
        header = json.dumps({"id": command["id"], "bytes": len(values), **answer}).encode()
        sys.stdout.buffer.write(struct.pack("<I", len(header)) + header + values)
        sys.stdout.buffer.flush()
        if command["do"] == "close":
            break


main()
